// A few rows x at once, many enough that reading them costs: out[t] = W x[t] on tensor cores.
//
// A warp multiplies 16 rows of W with N rows of x. Lane 4 g + t reads pieces (dequant.cuh) t, t + 4, ... of
// rows g and g + 8 and turns them into halves in registers: the columns of a sum may come in any order as long as both
// factors agree on it, so weights never go back through shared memory. How: k-quants as whole numbers (whole.cuh), the
// others in runs divided by powers of two (operand.cuh).
//
// W, as the file has it, and x go through stages in shared memory (stage.cuh) that are filled while earlier ones are
// multiplied: of W each warp has its own, which it fills itself, and those of x are the block's, filled by the warp that
// is through with one last (ring.cuh). So warps wait for each other but for a stage of x only, and where four multiply
// together. x comes ready (prepare_pages,
// rows.cu) in pages of 256 columns: 32 units of 8 columns, N rows each, then the sums over every 32 columns. Elements of
// a unit are crossed: 0 2 1 3 4 6 5 7. Row r of unit u is at place r ^ turn(u), so that the four units that the lanes of
// a row read at once do not meet in a bank, whatever the format.
//
// On sm_90a four warps multiply k-quants together, and the tensor cores read x from shared memory themselves, once for
// 64 rows. The elements of a unit are then pairs of the four lanes' columns (prepare_pages weaves them), in order of
// rows.
//
// Layout: blockIdx.x is a tile of 16 rows a warp (SwiGLU: 8 gate rows and their 8 up rows), blockIdx.y a block of N rows
// of x, blockIdx.z a part of the columns. Parts are added up in their order: by the last block of a tile, through `sums`;
// or, where that is null, by all of them, which then are a cluster.
// Launch: 32 threads a warp, up to `few_threads`; dynamic shared memory of `few_barriers` bytes and `stages` times that of
// a stage, and not below 16 bytes and 80 N a warp; `arrived` is zeros before and after. W is read before the predecessor
// is waited for, up to 15 bytes around a row.
#pragma once

#include "ring.cuh"
#include "stage.cuh"

namespace reflex {

constexpr int few_threads = 384;  // at most: 168 registers a thread
constexpr int few_stages = 4;     // at most
constexpr int few_barriers = 64;
static_assert(Feed::most == few_stages && Feed::barrier_bytes <= few_barriers);

// The 16 rows of W that a warp multiplies.
struct Tile {
  const FewArgs& args;
  int which = 0, block = blockIdx.x;  // the matrix, and which tile of it

  __device__ __forceinline__ Tile(const FewArgs& args, int rows) : args(args) {
#pragma unroll 1
    for (int blocks; !args.swiglu; ++which) {
      blocks = (args.matrix[which].n_out + rows - 1) / rows;
      if (block < blocks) break;
      block -= blocks;
    }
  }
  __device__ __forceinline__ const Matrix& gate() const { return args.matrix[which]; }
  __device__ __forceinline__ const Matrix& up() const { return args.matrix[args.swiglu ? 1 : which]; }
  __device__ __forceinline__ int yield() const { return args.swiglu ? 8 : 16; }  // rows of the result
  __device__ __forceinline__ int first() const { return (block * (int)(blockDim.x / 32) + (int)threadIdx.x / 32) * yield(); }
  __device__ __forceinline__ int last() const { return gate().n_out - 1; }
  // Row r of the 16.
  __device__ __forceinline__ const uint8_t* row(int r, int bytes) const {
    const Matrix& matrix = args.swiglu && r >= 8 ? up() : gate();
    return matrix.weight + (size_t)min(first() + (args.swiglu ? r % 8 : r), last()) * bytes;
  }
};

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Stages of these rows in shared memory, side by side; lanes copy neighbouring 16 bytes.
template <class Format, int N>
struct Rows {
  using S = Stage<Format, N>;
  static constexpr int slots = S::few_slots, slot = 16 * slots, stage_bytes = 16 * slot;
  static constexpr int copies = (16 * slots + 31) / 32;
  uint32_t data;  // shared address of the warp's stages
  int bytes;      // of a row
  const uint8_t* source[copies];
  uint32_t low[2];  // bits of the addresses of the two rows that this lane multiplies

  // From stage `begin` on.
  __device__ __forceinline__ Rows(const Tile& tile, uint32_t data, int bytes, int begin) : data(data), bytes(bytes) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const int at = lane + 32 * i;
      source[i] = tile.row(at / slots % 16, bytes) + (size_t)begin * S::bytes + 16 * (at % slots);
    }
    low[0] = low_bits(tile.row(lane / 4, bytes)), low[1] = low_bits(tile.row(lane / 4 + 8, bytes));
  }
  // Stages in turn; a group of copies each, also where there is nothing left.
  __device__ __forceinline__ void fill(int stage, int end, int place) {
    if (stage < end) {
      const int lane = threadIdx.x % 32;
      const uint32_t to = data + place * stage_bytes + 16 * lane;
      const int left = Whole<Format>::exists ? S::bytes : min(S::bytes, bytes - stage * S::bytes);
#pragma unroll
      for (int i = 0; i < copies; ++i) {
        const int at = lane + 32 * i, chunk = at % slots;
        const int early = S::alike ? 0 : (int)(reinterpret_cast<uintptr_t>(source[i]) & 15);
        if (at < 16 * slots && 16 * chunk < early + left) copy16(to + 512 * i, source[i] - early, true);
        source[i] += S::bytes;
      }
    }
    commit_copies();
  }
  // Row g, or g + 8, of lane 4 g + t.
  __device__ __forceinline__ SharedBytes at(int which, int stage, int place) const {
    const uint32_t early = S::alike ? 0 : (low[which] + (uint32_t)stage * S::bytes) & 15;
    return {data + place * stage_bytes + (threadIdx.x % 32 / 4 + 8 * which) * slot + early};
  }
};

// All but the latest `pending` groups of copies of this thread, at most 3, have arrived.
__device__ __forceinline__ void wait_copies(int pending) {
  if (pending > 2) {
    wait_copies<3>();
  } else if (pending > 1) {
    wait_copies<2>();
  } else if (pending > 0) {
    wait_copies<1>();
  } else {
    wait_copies<0>();
  }
}

// What a lane has of 16 rows times N: the accumulators of `mma`, 8 rows of x an element.
template <int N>
struct Sums {
  float v[N / 8][4] = {};

  __device__ __forceinline__ void add(int n, const float (&c)[4], float factor0, float factor1) {
    v[n][0] = fmaf(c[0], factor0, v[n][0]);
    v[n][1] = fmaf(c[1], factor0, v[n][1]);
    v[n][2] = fmaf(c[2], factor1, v[n][2]);
    v[n][3] = fmaf(c[3], factor1, v[n][3]);
  }
};

// A stage of k-quants, by four warps together. `x`: shared address of the stage's units. `meanwhile` is called when the
// last numbers are being multiplied, and may read the next stage of W into a0 and a1.
template <class Format, int N, class Meanwhile>
__device__ __forceinline__ void multiply_together(Whole<Format>& a0, Whole<Format>& a1, uint32_t x, Sums<N>& sums,
                                                  Meanwhile meanwhile) {
  const float factor0 = a0.factor, factor1 = a1.factor;
  const uint64_t units = group_operand(x, 16 * N);
  float c[N / 8][4];
  uint32_t a[2][4][4];
  if constexpr (Whole<Format>::has_minima) {
    uint32_t(&now)[4] = a[1][0];
    now[0] = now[2] = a0.minima, now[1] = now[3] = a1.minima;
    group_begin();
    group_multiply(c, now, units + 32 * N, true);
    group_commit();
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    auto& now = a[r % 2];  // the other one is being multiplied
    if (r > 1) {
      group_wait<1>();
#pragma unroll
      for (int i = 0; i < 16; ++i) group_keep(now[i / 4][i % 4]);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t h0[2], h1[2];
      a0.numbers(r, w, h0);
      a1.numbers(r, w, h1);
      now[w][0] = h0[0], now[w][1] = h1[0], now[w][2] = h0[1], now[w][3] = h1[1];
    }
    if constexpr (Whole<Format>::has_minima) {
      if (r == 0) {
        group_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; ++i) group_keep(a[1][0][i]);
#pragma unroll
        for (int n = 0; n < N / 8; ++n) sums.add(n, c[n], -page_sum * a0.least, -page_sum * a1.least);
      }
    }
    group_begin();
#pragma unroll
    for (int w = 0; w < 4; ++w) group_multiply(c, now[w], units + (4 * r + w) * 2 * N, r + w == 0);
    group_commit();
  }
  meanwhile();
  group_wait<0>();
#pragma unroll
  for (int i = 0; i < 32; ++i) group_keep(a[i / 16][i / 4 % 4][i % 4]);
#pragma unroll
  for (int n = 0; n < N / 8; ++n) sums.add(n, c[n], factor0, factor1);
}

// Units of x in shared memory as one lane reads them: its first ones are at `unit` of the stage.
template <int N>
struct Units {
  uint32_t x;
  int unit, turned;

  // `in_page`: of the stage's first unit.
  __device__ __forceinline__ Units(uint32_t x, int unit, int in_page)
      : x(x), unit(unit), turned((int)(threadIdx.x % 32 / 4) ^ turn(unit + in_page)) {}
  // Of 8 columns, `step` units after the first ones, and rows 8 n .. 8 n + 7 of x those that this lane multiplies.
  __device__ __forceinline__ uint4 at(int step, int n) const {
    return words4_at(SharedBytes{x + 16 * ((unit + step) * N + (turned ^ turn(step))) + 128 * n});
  }
};

// The same by a warp alone.
template <class Format, int N>
__device__ __forceinline__ void multiply_whole(const Whole<Format>& a0, const Whole<Format>& a1, const Units<N>& units,
                                               Sums<N>& sums) {
  using S = Stage<Format, N>;
  const int lane = threadIdx.x % 32;
  if constexpr (Whole<Format>::has_minima) {
    const uint32_t x = units.x + S::columns / 8 * N * 16 + 16 * (lane / 4) + 4 * (lane % 4);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      float d[4] = {};
      mma8(d, a0.minima, a1.minima, word_at(SharedBytes{x + 128 * n}));
      mma8(d, a0.minima, a1.minima, word_at(SharedBytes{x + 128 * n + 16 * N}));
      sums.add(n, d, -page_sum * a0.least, -page_sum * a1.least);
    }
  }
  float c[N / 8][4] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int r = k / 4 * 2 + k % 2, half = k / 2 % 2;  // low and high nibbles in turn: then both are done with
    uint4 b[N / 8];
#pragma unroll
    for (int n = 0; n < N / 8; ++n) b[n] = units.at(S::step(r, half), n);
    uint32_t h0[2], h1[2];
    a0.numbers(r, 2 * half, h0);
    a1.numbers(r, 2 * half, h1);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) mma(c[n], {h0[0], h1[0], h0[1], h1[1]}, b[n].x, b[n].y);
    a0.numbers(r, 2 * half + 1, h0);
    a1.numbers(r, 2 * half + 1, h1);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) mma(c[n], {h0[0], h1[0], h0[1], h1[1]}, b[n].z, b[n].w);
  }
#pragma unroll
  for (int n = 0; n < N / 8; ++n) sums.add(n, c[n], a0.factor, a1.factor);
}

// A piece of each of two rows, of any other format.
template <class Format, int N>
__device__ __forceinline__ void multiply_pieces(const typename Operand<Format>::Parts& a0,
                                                const typename Operand<Format>::Parts& a1, const Units<N>& units,
                                                Sums<N>& sums) {
  using W = Operand<Format>;
  using S = Stage<Format, N>;
  // The upper halves of what bounds both rows in a word: a power of two depends on no more.
  uint32_t bounds[W::runs / W::group];
  if constexpr (W::is_scaled) {
#pragma unroll
    for (int i = 0; i < W::runs / W::group; ++i) {
      uint32_t both = permute(W::bound(a0, i * W::group), W::bound(a1, i * W::group), 0x7632);
      both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, 1));
      bounds[i] = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, 2));
    }
  }
#pragma unroll
  for (int j = 0; j < W::runs / W::group; ++j) {  // runs of one power of two
    float power0 = 1, power1 = 1, inverse0 = 1, inverse1 = 1;
    if constexpr (W::is_scaled) {
      power0 = power_above(bounds[j] << 16), power1 = power_above(bounds[j] & 0xffff0000u);
      inverse0 = reciprocal_of_power(power0), inverse1 = reciprocal_of_power(power1);
    }
    uint32_t h0[W::group][8], h1[W::group][8];
#pragma unroll
    for (int k = 0; k < W::group; ++k) {
      W::template to_half<true>(a0, j * W::group + k, inverse0, h0[k]);
      W::template to_half<true>(a1, j * W::group + k, inverse1, h1[k]);
    }
    constexpr int at_once = N / 8 % 5 == 0 ? 5 : N > 48 ? 2 : 4;  // side by side: one alone would wait for itself
#pragma unroll
    for (int n = 0; n < N / 8; n += at_once) {
      float c[at_once][4] = {};
#pragma unroll
      for (int half = 0; half < 2 * W::group; ++half) {
        const uint32_t(&u)[8] = h0[half / 2], (&v)[8] = h1[half / 2];
        const int q = half % 2 * 4;
        uint4 b[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) b[i] = units.at(S::step(j * W::group + half / 2, half % 2), n + i);
#pragma unroll
        for (int i = 0; i < at_once; ++i) mma(c[i], {u[q], v[q], u[q + 1], v[q + 1]}, b[i].x, b[i].y);
#pragma unroll
        for (int i = 0; i < at_once; ++i) mma(c[i], {u[q + 2], v[q + 2], u[q + 3], v[q + 3]}, b[i].z, b[i].w);
      }
#pragma unroll
      for (int i = 0; i < at_once; ++i) sums.add(n + i, c[i], power0, power1);
    }
  }
}

// A stage: `x` and this lane's two rows of W in shared memory, `in_page` the first unit of x in its page, `left` the
// columns from here to a row's end. `aligned`: rows are whole 16-byte words. `is_read` is called when the warp has read W.
template <class Format, int N, class IsRead>
__device__ __forceinline__ void multiply_stage(uint32_t x, SharedBytes w0, SharedBytes w1, int in_page, int left,
                                               bool aligned, Sums<N>& sums, IsRead is_read) {
  using W = Operand<Format>;
  using S = Stage<Format, N>;
  const int t = threadIdx.x % 4;
  if constexpr (Whole<Format>::exists) {
    static_assert(S::slices == 1 && page_columns == S::columns);
    Whole<Format> a0(w0, t), a1(w1, t);
    if constexpr (has_groups) {
      multiply_together<Format, N>(a0, a1, x, sums, is_read);
    } else {
      is_read();
      multiply_whole<Format, N>(a0, a1, Units<N>(x, S::base(t), 0), sums);
    }
  } else {
#pragma unroll 1
    for (int slice = 0; slice < S::slices; ++slice) {
      const int piece = 4 * slice + t, within = piece % W::block_pieces, at = piece / W::block_pieces;
      typename W::Raw raw0 = {}, raw1 = {};
      if (16 * W::runs * piece < left) {
        const int rest = left - at * W::block_elements;
        raw0 = W::fetch(w0 + at * W::block_bytes, within, rest, aligned);
        raw1 = W::fetch(w1 + at * W::block_bytes, within, rest, aligned);
      }
      typename W::Parts a0, a1;
      W::unpack(raw0, within, a0);
      W::unpack(raw1, within, a1);
      multiply_pieces<Format, N>(a0, a1, Units<N>(x, S::base(piece), in_page), sums);
    }
    is_read();
  }
}

// Sums of all parts of a tile, in their order, in the block that is there last. `mine`: (N, 16) of this warp in shared
// memory, rows `stride` floats apart, and a place for an int behind those of all warps. False in all other blocks.
template <int N, int stride>
__device__ __forceinline__ bool add_parts(const FewArgs& args, float* mine, int* is_last) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile = blockIdx.y * gridDim.x + blockIdx.x, parts = gridDim.z, part = N * blockDim.x / 2;  // floats of a part
  float* own = args.sums + (size_t)tile * parts * part + warp * N * 16;
  auto at = [&](int i) { return reinterpret_cast<float4*>(mine + i / 4 * stride + i % 4 * 4); };
#pragma unroll
  for (int i = 0; i < N / 8; ++i) reinterpret_cast<float4*>(own + blockIdx.z * part)[lane + 32 * i] = *at(lane + 32 * i);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = atomicAdd(&args.arrived[tile], 1) == parts - 1;
    if (*is_last) args.arrived[tile] = 0;
  }
  __syncthreads();
  if (!*is_last) return false;
  __threadfence();
  float4 total[N / 8] = {};
#pragma unroll 2
  for (int p = 0; p < parts; ++p) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) total[i] = total[i] + __ldcg(reinterpret_cast<const float4*>(own + (size_t)p * part) + lane + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < N / 8; ++i) *at(lane + 32 * i) = total[i];
  __syncwarp();
  return true;
}

// The result of rows `begin` .. `end` - 1 of the block's N, four rows of W a lane: what memory has to say to them is asked
// for together. sums(at): four sums from place `at` of (N, 16), rows `stride` floats apart, on.
template <int N, int stride, class SumsAt>
__device__ __forceinline__ void write_out(const FewArgs& args, const Tile& tile, int begin, int end, SumsAt sums) {
  const Matrix &gate = tile.gate(), &up = tile.up();
  constexpr int fours = 4;
  const int across = tile.yield() / fours;  // lanes for a row of x
#pragma unroll 1
  for (int i = begin * across + threadIdx.x % 32; i < end * across; i += 32) {
    const int m = blockIdx.y * N + i / across, r = i % across * fours, row = tile.first() + r;
    if (m >= args.m) break;
    const int at = i / across * stride + r;
    const size_t to = (size_t)m * gate.out_stride + row;
    const float scale = __ldg(args.x_scale + m);
    float v[fours], w[fours], residual[fours];
#pragma unroll
    for (int k = 0; k < fours; ++k) {
      const bool there = row + k <= tile.last();
      residual[k] = gate.residual && there ? gate.residual[to + k] : 0.0f;
      v[k] = gate.bias && there ? __ldg(gate.bias + row + k) : 0.0f;
      w[k] = args.swiglu && up.bias && there ? __ldg(up.bias + row + k) : 0.0f;
    }
    const float4 of_gate = sums(at), of_up = args.swiglu ? sums(at + 8) : float4{};
    const float a[fours] = {of_gate.x, of_gate.y, of_gate.z, of_gate.w}, b[fours] = {of_up.x, of_up.y, of_up.z, of_up.w};
#pragma unroll
    for (int k = 0; k < fours; ++k) {
      v[k] += a[k] * scale;
      if (args.swiglu) v[k] = silu(v[k]) * (b[k] * scale + w[k]);
      if (row + k <= tile.last()) gate.out[to + k] = v[k] + residual[k];
    }
  }
}

template <class Format, int N>
__device__ __forceinline__ void few(const FewArgs& args) {
  using S = Stage<Format, N>;
  static_assert(N % 8 == 0);
  if constexpr (!Whole<Format>::exists) static_assert(S::is_orderly());
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const int stages = args.stages;
  const Tile tile(args, 16 * warps);
  const int bytes = (int)row_bytes<Format>(args.n_in);
  const int begin = blockIdx.z * args.part_stages;
  const int end = min(begin + args.part_stages, (args.n_in + S::columns - 1) / S::columns);

  const uint32_t barriers = shared_address(shared), data = barriers + few_barriers;
  Feed feed(data, barriers, stages, S::x_bytes);
  const uint4* pages = args.x + (size_t)blockIdx.y * page_chunks(N) * ((args.n_in + page_columns - 1) / page_columns);
  auto fill_x = [&](int stage, int place) {
    if (stage < end)
      feed.fill(place, pages + stage / S::a_page * page_chunks(N) + stage % S::a_page * S::x_chunks, S::x_bytes);
  };
  Rows<Format, N> rows(tile, data + stages * (S::x_bytes + warp * Rows<Format, N>::stage_bytes), bytes, begin);
  auto fill_w = [&](int stage, int place) { rows.fill(stage, end, place); };

  // Where every thread copies its share of x, all have to be through with a stage before it is filled again.
  const int ahead = has_copy_engine ? stages : stages - 1;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) fill_w(begin + i, i);
  let_successor_start();
  wait_for_predecessor();
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (!has_copy_engine || threadIdx.x == 0) fill_x(begin + i, i);
    if constexpr (!has_copy_engine) commit_copies();  // later than all of W, so that x is there with the stage's turn
  }

  Sums<N> sums;
  // A stage of k-quants is read while the one before is multiplied, where registers suffice.
  if constexpr (has_groups && Whole<Format>::exists && (N <= 40 || is_same<Format, Q4_K>::value)) {
    auto read = [&](int which, int stage, int place) {
      return Whole<Format>(rows.at(which, stage, place), threadIdx.x % 4);
    };
    wait_copies(stages - 1);
    __syncwarp();
    Whole<Format> a0 = read(0, begin, 0), a1 = read(1, begin, 0);
#pragma unroll 1
    for (int stage = begin; stage < end; ++stage) {
      const int place = feed.now.at, next = place + 1 == stages ? 0 : place + 1;
      feed.wait();
      __syncwarp();
      multiply_together<Format, N>(a0, a1, feed.address(place), sums, [&] {
        fill_w(stage + stages, place);
        wait_copies(stages - 1);
        __syncwarp();
        a0 = read(0, stage + 1, next), a1 = read(1, stage + 1, next);  // behind the last one, what is not used
      });
      if (feed.is_last()) fill_x(stage + stages, place);
      feed.now.advance(stages);
    }
  } else {
#pragma unroll 1
    for (int stage = begin; stage < end; ++stage) {
      const int place = feed.now.at;
      wait_copies(has_copy_engine ? stages - 1 : stages - 2);
      if constexpr (has_copy_engine) {
        feed.wait();
        __syncwarp();
      } else {
        __syncthreads();
        const int before = place ? place - 1 : ahead;
        fill_x(stage + ahead, before);
        fill_w(stage + ahead, before);
      }
      multiply_stage<Format, N>(feed.address(place), rows.at(0, stage, place), rows.at(1, stage, place),
                                stage % S::a_page * (S::columns / 8), args.n_in - stage * S::columns, bytes % 16 == 0,
                                sums, [&] {
                                  if constexpr (has_copy_engine) {
                                    __syncwarp();
                                    fill_w(stage + ahead, place);
                                  }
                                });
      if constexpr (has_copy_engine) {
        __syncwarp();
        if (feed.is_last()) fill_x(stage + ahead, place);
      }
      feed.now.advance(stages);
    }
  }

  // Through shared memory, so that rows are written side by side; no two accumulators of a warp fall into one bank.
  constexpr int stride = 20;
  float* mine = reinterpret_cast<float*>(shared) + warp * N * stride;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    float* to = mine + (8 * n + 2 * t) * stride + g;
    to[0] = sums.v[n][0], to[stride] = sums.v[n][1], to[8] = sums.v[n][2], to[stride + 8] = sums.v[n][3];
  }
  __syncwarp();
  if constexpr (has_clusters) {
    if (gridDim.z > 1 && !args.sums) {
      // Every block of the cluster adds up a share of the rows of x.
      const int parts = gridDim.z, share = (N + parts - 1) / parts, from = min(N, (int)blockIdx.z * share);
      const uint32_t address = shared_address(mine);
      __syncwarp();
      cluster_barrier();
      write_out<N, stride>(args, tile, from, min(N, from + share), [&](int at) {
        float4 total = {};
#pragma unroll 4
        for (int p = 0; p < parts; ++p) total = total + load_of_block(address + 4 * at, p);
        return total;
      });
      __syncwarp();
      cluster_barrier();  // what others still read
      return;
    }
  }
  if (args.sums && !add_parts<N, stride>(args, mine, reinterpret_cast<int*>(shared) + warps * N * stride)) return;
  write_out<N, stride>(args, tile, 0, N, [&](int at) { return *reinterpret_cast<const float4*>(mine + at); });
}

}  // namespace reflex

#define REFLEX_FEW(NAME, FORMAT, N)                                    \
  extern "C" __global__ void __launch_bounds__(reflex::few_threads, 1) \
      NAME(const __grid_constant__ reflex::FewArgs args) {             \
    reflex::few<reflex::FORMAT, N>(args);                              \
  }
