// A few rows x at once, many enough that reading them costs: out[t] = W x[t] on tensor cores.
//
// A warp multiplies 16 rows of W with N rows of x. Lane 4 g + t reads pieces (dequant.cuh) t, t + 4, ... of rows g and
// g + 8 and turns them into halves in registers: the columns of a sum may come in any order as long as both factors agree
// on it, so weights never go back through shared memory.
//
// W, as the file has it, and x go through stages in shared memory (stage.cuh) that are filled while earlier ones are
// multiplied (multiply.cuh): of W each warp has its own, which it fills itself, and those of x are the block's, filled by
// the warp that is through with one last (ring.cuh). So warps wait for a stage of x, and where four multiply together for
// each other, but not for the block. x comes ready (prepare_pages, rows.cu) in pages of 256 columns: 32 units of 8
// columns, N rows each, then the sums over every 32 columns. Elements of a unit are crossed: 0 2 1 3 4 6 5 7. Row r of
// unit u is at place r ^ turn(u), so that the four units that the lanes of a row read at once do not meet in a bank,
// whatever the format.
//
// On sm_90a four warps multiply k-quants together, and the tensor cores read x from shared memory themselves, once for
// 64 rows. The elements of a unit are then pairs of the four lanes' columns (prepare_pages weaves them), in order of
// rows.
//
// Layout: blockIdx.x is a tile of 16 rows a warp (SwiGLU: 8 gate rows and their 8 up rows), blockIdx.y a block of N rows
// of x, blockIdx.z a part of the columns. Parts are added up in their order: where there are clusters, by all blocks of a
// tile, which are one; elsewhere by the last one, through `sums`.
// Launch: 32 threads a warp, up to `few_threads`; dynamic shared memory of `few_barriers` bytes and behind them `stages`
// times that of a stage, or at least 16 bytes and 80 N a warp; `arrived` is zeros before and after. W is read before the
// predecessor is waited for, up to 15 bytes around a row.
#pragma once

#include "multiply.cuh"
#include "ring.cuh"

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

  let_successor_start();  // not earlier: the successor's blocks, and those that it lets start, would be in the way

  // Through shared memory, so that rows are written side by side; no two accumulators of a warp fall into one bank. Not
  // where the barriers are: a device may write to these until the block ends (docs/decisions.md).
  constexpr int stride = 20;
  float* const all = reinterpret_cast<float*>(shared + few_barriers);
  float* mine = all + warp * N * stride;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    float* to = mine + (8 * n + 2 * t) * stride + g;
    to[0] = sums.v[n][0], to[stride] = sums.v[n][1], to[8] = sums.v[n][2], to[stride + 8] = sums.v[n][3];
  }
  __syncwarp();
  if constexpr (has_clusters) {
    if (gridDim.z > 1) {
      // Every block of the cluster adds up a share of the rows of x.
      const int parts = gridDim.z, share = (N + parts - 1) / parts, from = min(N, (int)blockIdx.z * share);
      const uint32_t address = shared_address(mine);
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
  } else {
    if (gridDim.z > 1 && !add_parts<N, stride>(args, mine, reinterpret_cast<int*>(all) + warps * N * stride)) return;
  }
  write_out<N, stride>(args, tile, 0, N, [&](int at) { return *reinterpret_cast<const float4*>(mine + at); });
}

}  // namespace reflex

#define REFLEX_FEW(NAME, FORMAT, N)                                    \
  extern "C" __global__ void __launch_bounds__(reflex::few_threads, 1) \
      NAME(const __grid_constant__ reflex::FewArgs args) {             \
    reflex::few<reflex::FORMAT, N>(args);                              \
  }
