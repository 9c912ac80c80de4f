// A few rows x at once, many enough that reading them costs: out[t] = W x[t] on tensor cores.
//
// A warp multiplies 16 rows of W with N rows of x, more than 16. Lane 4 g + t reads pieces (dequant.cuh) t, t + 4, ... of
// rows g and g + 8 and turns them into halves in registers: the columns of a sum may come in any order as long as both
// factors agree on it, so weights never go back through shared memory. How: k-quants as whole numbers (whole.cuh), the
// others in runs divided by powers of two (operand.cuh).
//
// W, as the file has it, and x go through stages in shared memory that are filled while earlier ones are multiplied. A
// stage is `columns` of the 16 rows of each warp, rows `slot` bytes apart, and the same columns of N rows of x. x comes
// ready (prepare_pages, rows.cu) in pages of 256 columns: 32 units of 8 columns, N rows each, then the sums over every
// 32 columns. Elements of a unit are crossed: 0 2 1 3 4 6 5 7. Row r of unit u is at place r ^ turn(u), so that the four
// units that the lanes of a row read at once do not meet in a bank, whatever the format.
//
// On sm_90a four warps multiply k-quants together, and the tensor cores read x from shared memory themselves, once for
// 64 rows. The elements of a unit are then pairs of the four lanes' columns (prepare_pages weaves them), in order of
// rows.
//
// Layout: blockIdx.x is a tile of 16 rows a warp (SwiGLU: 8 gate rows and their 8 up rows), blockIdx.y a block of N rows
// of x, blockIdx.z a part of the columns; where there are several, the last block of a tile adds them up in order.
// Launch: 32 threads a warp, up to `few_threads`; dynamic shared memory of 64 bytes and `stages` times that of a stage,
// and not below 16 bytes and 80 N a warp; `arrived` is zeros before and after. W is read before the predecessor is
// waited for, up to 15 bytes around a row.
#pragma once

#include "pages.cuh"
#include "whole.cuh"

namespace reflex {

constexpr int few_threads = 384;  // at most: 168 registers a thread
constexpr int few_stages = 4;     // at most

template <class Format, int N>
struct Stage {
  using W = Operand<Format>;
  static constexpr int slices = W::block_pieces > 4 ? W::block_pieces / 4 : W::runs == 1 ? 2 : 1;
  static constexpr int columns = 64 * W::runs * slices;
  static constexpr int a_page = page_columns / columns;
  static constexpr int bytes = columns / W::block_elements * W::block_bytes;  // of a row
  static constexpr bool alike = !is_float<Format> && W::block_bytes % 16 == 0;  // every row begins at a multiple of 16
  static constexpr int chunks = alike ? bytes / 16 : (bytes + 30) / 16;         // of 16 bytes, of a row
  // What lanes read at once shall not meet in a bank: rows that are an odd number of 16 bytes apart do not, or, where
  // lanes read chunks 0, 1, 4 and 5 of two rows (whole.cuh), rows that are 2 chunks apart, or 6.
  static constexpr int slots = chunks | 1, slot = 16 * slots;
  static constexpr int few_slots = Whole<Format>::has_minima ? (chunks + 1) / 4 * 4 + 2 : slots;
  static constexpr int x_chunks = (columns / 8 + 2 * Whole<Format>::has_minima) * N;
  static constexpr int x_bytes = 16 * x_chunks;

  // Of the 8 columns that a lane multiplies next: units of different lanes and of different runs share no bit.
  static constexpr int base(int piece) {
    if (Whole<Format>::exists) return 16 * (piece / 2) + 2 * (piece % 2);
    return (piece / W::block_pieces * W::block_elements + W::position(piece % W::block_pieces, 0)) / 8;
  }
  static constexpr int step(int run, int half) {
    return (Whole<Format>::exists ? 4 * run : W::position(0, run) / 8) + half;
  }
  static constexpr bool is_orderly() {
    for (int piece = 0; piece < 4 * slices; ++piece) {
      for (int run = 0; run < W::runs; ++run) {
        const int at = W::position(piece % W::block_pieces, run) - W::position(piece % W::block_pieces, 0);
        if (at != W::position(0, run) || (base(piece) & step(run, 1)) || (base(piece) & step(run, 0))) return false;
      }
    }
    return true;
  }
};

template <class Format, int N>
__device__ __forceinline__ void few(const FewArgs& args) {
  using W = Operand<Format>;
  using S = Stage<Format, N>;
  constexpr int slots = S::few_slots, slot = 16 * slots;
  static_assert(N % 8 == 0);
  if constexpr (!Whole<Format>::exists) static_assert(S::is_orderly());
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const int yield = args.swiglu ? 8 : 16;

  int block = blockIdx.x, which = 0;
#pragma unroll 1
  for (int blocks; !args.swiglu; ++which) {
    blocks = (args.matrix[which].n_out + 16 * warps - 1) / (16 * warps);
    if (block < blocks) break;
    block -= blocks;
  }
  const Matrix& gate = args.matrix[which];
  const Matrix& other = args.matrix[args.swiglu ? 1 : which];
  const int bytes = (int)row_bytes<Format>(args.n_in);
  const bool aligned = bytes % 16 == 0;
  const int first = (block * warps + warp) * yield, last = gate.n_out - 1;
  auto row_of = [&](int r) {  // of the 16 of this warp
    const Matrix& matrix = args.swiglu && r >= 8 ? other : gate;
    return matrix.weight + (size_t)min(first + (args.swiglu ? r % 8 : r), last) * bytes;
  };
  const uint32_t low0 = low_bits(row_of(g)), low1 = low_bits(row_of(g + 8));
  const int begin = blockIdx.z * args.part_stages;
  const int end = min(begin + args.part_stages, (args.n_in + S::columns - 1) / S::columns);

  // The 16 rows of a warp lie side by side in a stage, and lanes copy neighbouring 16 bytes.
  const uint32_t base = shared_address(shared) + 16 * few_stages, stage_bytes = S::x_bytes + warps * 16 * slot;
  constexpr int copies = (16 * slots + 31) / 32;
  const uint8_t* source[copies];
#pragma unroll
  for (int i = 0; i < copies; ++i) {
    const int at = lane + 32 * i, row = at / slots;
    source[i] = row_of(row % 16) + (size_t)begin * S::bytes + 16 * (at % slots);
  }
  auto copy_w = [&](int stage, int buffer) {  // stages in turn
    if (stage < end) {
      const uint32_t to = base + buffer * stage_bytes + S::x_bytes + warp * 16 * slot + 16 * lane;
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
  };
  const uint4* pages = args.x + (size_t)blockIdx.y * page_chunks(N) * ((args.n_in + page_columns - 1) / page_columns);
  const Feed feed(shared_address(shared), args.stages);
  auto copy_x = [&](int stage, int buffer) {
    if (stage >= end) return;
    const uint4* from = pages + stage / S::a_page * page_chunks(N) + stage % S::a_page * S::x_chunks;
    feed.fill(buffer, base + buffer * stage_bytes, from, S::x_bytes);
  };

#pragma unroll 1
  for (int i = 0; i < args.stages - 1; ++i) copy_w(begin + i, i);
  let_successor_start();
  wait_for_predecessor();
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < args.stages - 1; ++i) {
    copy_x(begin + i, i);
    feed.commit();  // later than all of W, so that a stage's x has arrived when `stages - 2` groups are left
  }

  float sum[N / 8][4] = {};
  int buffer = 0, phase = 0;
#pragma unroll 1
  for (int stage = begin; stage < end; ++stage) {
    // This stage's copies have arrived for every thread, and everyone is done with the one that is filled next.
    if (args.stages > 3) {
      wait_copies<2>();
    } else if (args.stages > 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const int free = buffer == 0 ? args.stages - 1 : buffer - 1;
    copy_x(stage + args.stages - 1, free);
    copy_w(stage + args.stages - 1, free);

    feed.wait(buffer, phase);
    const uint32_t w0 = base + buffer * stage_bytes + S::x_bytes + (warp * 16 + g) * slot, w1 = w0 + 8 * slot;
    const uint32_t early0 = S::alike ? 0 : (low0 + (uint32_t)stage * S::bytes) & 15;
    const uint32_t early1 = S::alike ? 0 : (low1 + (uint32_t)stage * S::bytes) & 15;
    const uint8_t* x_stage = shared + 16 * few_stages + buffer * stage_bytes;
    const int left = args.n_in - stage * S::columns;
#pragma unroll 1
    for (int slice = 0; slice < S::slices; ++slice) {
      const int piece = 4 * slice + t, within = piece % W::block_pieces, at = piece / W::block_pieces;
      const int unit = S::base(piece), turned = g ^ turn(unit + stage % S::a_page * (S::columns / 8));
      // x of 8 columns a lane, `step` units after its first ones, for neighbouring n.
      auto x_of = [&](int step, int n) {
        const uint8_t* from = x_stage + 16 * ((unit + step) * N + (turned ^ turn(step)));
        return *reinterpret_cast<const uint4*>(from + 128 * n);
      };
      auto add = [&](int n, const float(&c)[4], float factor0, float factor1) {
        sum[n][0] = fmaf(c[0], factor0, sum[n][0]);
        sum[n][1] = fmaf(c[1], factor0, sum[n][1]);
        sum[n][2] = fmaf(c[2], factor1, sum[n][2]);
        sum[n][3] = fmaf(c[3], factor1, sum[n][3]);
      };
      if constexpr (Whole<Format>::exists) {
        const Whole<Format> a0(SharedBytes{w0 + early0}, t), a1(SharedBytes{w1 + early1}, t);
        float c[N / 8][4];
        if constexpr (has_groups) {
          const uint64_t units = group_operand(base + buffer * stage_bytes, 16 * N);
          uint32_t a[2][4][4];
          if constexpr (Whole<Format>::has_minima) {
            uint32_t(&now)[4] = a[1][0];
            now[0] = now[2] = a0.minima, now[1] = now[3] = a1.minima;
            group_begin();
            group_multiply(c, now, units + S::columns / 8 * N, true);
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
                for (int n = 0; n < N / 8; ++n) add(n, c[n], -page_sum * a0.least, -page_sum * a1.least);
              }
            }
            group_begin();
#pragma unroll
            for (int w = 0; w < 4; ++w) group_multiply(c, now[w], units + (4 * r + w) * 2 * N, r + w == 0);
            group_commit();
          }
          group_wait<0>();
#pragma unroll
          for (int i = 0; i < 32; ++i) group_keep(a[i / 16][i / 4 % 4][i % 4]);
        } else {
          if constexpr (Whole<Format>::has_minima) {
            const uint8_t* sums = x_stage + S::columns / 8 * N * 16 + 16 * g + 4 * t;
#pragma unroll
            for (int n = 0; n < N / 8; ++n) {
              float d[4] = {};
              mma8(d, a0.minima, a1.minima, *reinterpret_cast<const uint32_t*>(sums + 128 * n));
              mma8(d, a0.minima, a1.minima, *reinterpret_cast<const uint32_t*>(sums + 128 * n + 16 * N));
              add(n, d, -page_sum * a0.least, -page_sum * a1.least);
            }
          }
#pragma unroll
          for (int n = 0; n < N / 8; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const int r = k / 4 * 2 + k % 2, half = k / 2 % 2;  // low and high nibbles in turn: then both are done with
            uint4 b[N / 8];
#pragma unroll
            for (int n = 0; n < N / 8; ++n) b[n] = x_of(S::step(r, half), n);
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
        }
#pragma unroll
        for (int n = 0; n < N / 8; ++n) add(n, c[n], a0.factor, a1.factor);
      } else {
        typename W::Raw raw0 = {}, raw1 = {};
        if (16 * W::runs * piece < left) {
          const int rest = left - at * W::block_elements;
          raw0 = W::fetch(SharedBytes{w0 + early0 + at * W::block_bytes}, within, rest, aligned);
          raw1 = W::fetch(SharedBytes{w1 + early1 + at * W::block_bytes}, within, rest, aligned);
        }
        typename W::Parts a0, a1;
        W::unpack(raw0, within, a0);
        W::unpack(raw1, within, a1);
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
              for (int i = 0; i < at_once; ++i) b[i] = x_of(S::step(j * W::group + half / 2, half % 2), n + i);
#pragma unroll
              for (int i = 0; i < at_once; ++i) mma(c[i], {u[q], v[q], u[q + 1], v[q + 1]}, b[i].x, b[i].y);
#pragma unroll
              for (int i = 0; i < at_once; ++i) mma(c[i], {u[q + 2], v[q + 2], u[q + 3], v[q + 3]}, b[i].z, b[i].w);
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) add(n + i, c[i], power0, power1);
          }
        }
      }
    }
    if (++buffer == args.stages) buffer = 0, phase ^= 1;
  }

  // Through shared memory, so that rows are written side by side; no two accumulators of a warp fall into one bank.
  constexpr int stride = 20;
  float* sums = reinterpret_cast<float*>(shared) + warp * N * stride;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    float* to = sums + (8 * n + 2 * t) * stride + g;
    to[0] = sum[n][0], to[stride] = sum[n][1], to[8] = sum[n][2], to[stride + 8] = sum[n][3];
  }
  __syncwarp();
  if (args.sums) {
    const int tile = blockIdx.y * gridDim.x + blockIdx.x, parts = gridDim.z, part = N * 16 * warps;  // floats of a part
    float* own = args.sums + (size_t)tile * parts * part + warp * N * 16;
    auto at = [&](int i) { return reinterpret_cast<float4*>(sums + i / 4 * stride + i % 4 * 4); };
#pragma unroll
    for (int i = 0; i < N / 8; ++i) reinterpret_cast<float4*>(own + blockIdx.z * part)[lane + 32 * i] = *at(lane + 32 * i);
    int* is_last = reinterpret_cast<int*>(shared) + warps * N * stride;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *is_last = atomicAdd(&args.arrived[tile], 1) == parts - 1;
      if (*is_last) args.arrived[tile] = 0;
    }
    __syncthreads();
    if (!*is_last) return;
    __threadfence();
    float4 total[N / 8] = {};
#pragma unroll 2
    for (int p = 0; p < parts; ++p) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(own + (size_t)p * part) + lane + 32 * i);
        total[i].x += v.x, total[i].y += v.y, total[i].z += v.z, total[i].w += v.w;
      }
    }
#pragma unroll
    for (int i = 0; i < N / 8; ++i) *at(lane + 32 * i) = total[i];
    __syncwarp();
  }
  // What memory has to say to several results is asked for at once.
  constexpr int at_once = 2;
#pragma unroll 1
  for (int i = lane; i < N * yield; i += 32 * at_once) {
    float v[at_once], w[at_once] = {}, residual[at_once] = {};
    bool there[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int j = i + 32 * k, m = blockIdx.y * N + j / yield, row = first + j % yield;
      there[k] = j < N * yield && m < args.m && row <= last;
      if (!there[k]) continue;
      const float* from = sums + j / yield * stride + j % yield;
      const float scale = __ldg(args.x_scale + m);
      v[k] = from[0] * scale + (gate.bias ? __ldg(gate.bias + row) : 0.0f);
      if (args.swiglu) w[k] = from[8] * scale + (other.bias ? __ldg(other.bias + row) : 0.0f);
      if (gate.residual) residual[k] = gate.residual[(size_t)m * gate.out_stride + row];
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int j = i + 32 * k;
      if (!there[k]) continue;
      gate.out[(size_t)(blockIdx.y * N + j / yield) * gate.out_stride + first + j % yield] =
          (args.swiglu ? silu(v[k]) * w[k] : v[k]) + residual[k];
    }
  }
}

}  // namespace reflex

#define REFLEX_FEW(NAME, FORMAT, N)                                    \
  extern "C" __global__ void __launch_bounds__(reflex::few_threads, 1) \
      NAME(const __grid_constant__ reflex::FewArgs args) {             \
    reflex::few<reflex::FORMAT, N>(args);                              \
  }
