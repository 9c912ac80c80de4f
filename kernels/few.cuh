// A few rows x at once, many enough that reading them costs: out[t] = W x[t] on tensor cores.
//
// The arithmetic is that of matmul.cuh, whose header explains it: a warp multiplies 16 rows of W with N rows of x (more
// than 16), weights dequantised on the way into registers, runs of them divided by powers of two. But x is read from the
// second-level cache once a block, not once a warp, and with W goes through stages in shared memory that are filled
// while earlier ones are multiplied.
//
// A stage is `columns` of the 16 rows of each warp, as the file has them, `slot` bytes apart, and of N rows of x, 8
// columns a place: first those that the 4 lanes of a row need at once, so that neither copies nor reads meet in a bank.
//
// Layout: blockIdx.x is a tile of 16 rows a warp (SwiGLU: 8 gate rows and their 8 up rows), blockIdx.y a block of N rows
// of x, blockIdx.z a part of the columns; where there are several, `add_parts` (rows.cu) adds them up in order.
// Launch: 32 threads a warp, up to `few_threads`; dynamic shared memory `stages` times that of a stage; gridDim.z parts. W is
// read before the predecessor is waited for, up to 15 bytes around a row.
#pragma once

#include "operand.cuh"

namespace reflex {

// At most: 128 registers a thread, or 168 where there is more to hold.
template <class Format, int N>
constexpr int few_threads = Operand<Format>::runs * N > 64 || N > 48 ? 384 : 512;

template <class Format, int N>
struct Stage {
  using W = Operand<Format>;
  static constexpr int slices = W::block_pieces > 4 ? W::block_pieces / 4 : W::runs == 1 ? 2 : 1;
  static constexpr int columns = 64 * W::runs * slices;
  static constexpr int bytes = columns / W::block_elements * W::block_bytes;  // of a row
  static constexpr bool alike = !is_float<Format> && W::block_bytes % 16 == 0;  // every row begins at a multiple of 16
  static constexpr int chunks = alike ? bytes / 16 : (bytes + 30) / 16;         // of 16 bytes, of a row
  static constexpr int slot = 16 * (chunks | 1);
  static constexpr int place = 16 * (N + 2);  // bytes of 8 columns of x
  static constexpr int x_bytes = columns / 8 * place;
};

template <class Format, int N>
__device__ __forceinline__ void few(const FewArgs& args) {
  using W = Operand<Format>;
  using S = Stage<Format, N>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const int yield = args.swiglu ? 8 : 16;

  int block = blockIdx.x, which = 0, place = 0;  // place: of the matrix among the rows of all
#pragma unroll 1
  for (int blocks; !args.swiglu; ++which) {
    blocks = (args.matrix[which].n_out + 16 * warps - 1) / (16 * warps);
    if (block < blocks) break;
    block -= blocks;
    place += args.matrix[which].n_out;
  }
  const Matrix& gate = args.matrix[which];
  const Matrix& other = args.matrix[args.swiglu ? 1 : which];
  const int bytes = (int)row_bytes<Format>(args.n_in);
  const bool aligned = bytes % 16 == 0;
  const int first = (block * warps + warp) * yield, last = gate.n_out - 1;
  const uint8_t* row0 = gate.weight + (size_t)min(first + g, last) * bytes;
  const uint8_t* row1 = other.weight + (size_t)min(args.swiglu ? first + g : first + g + 8, last) * bytes;
  const int begin = blockIdx.z * args.part_stages;
  const int end = min(begin + args.part_stages, (args.n_in + S::columns - 1) / S::columns);

  const uint32_t base = shared_address(shared), stage_bytes = S::x_bytes + warps * 16 * S::slot;
  const uint32_t own = S::x_bytes + (warp * 16 + g) * S::slot;  // row g of this warp in a stage
  auto copy_w = [&](int stage, int buffer) {
    if (stage >= end) return;
    const uint32_t to = base + buffer * stage_bytes + own + 16 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* from = (r ? row1 : row0) + (size_t)stage * S::bytes;
      const int early = S::alike ? 0 : (int)(reinterpret_cast<uintptr_t>(from) & 15);
      const int there = early + min(S::bytes, bytes - stage * S::bytes) - 16 * t;
      from += 16 * t - early;
#pragma unroll
      for (int i = 0; i < (S::chunks + 3) / 4; ++i) {
        if (64 * i < there) copy16(to + r * 8 * S::slot + 64 * i, from + 64 * i, true);
      }
    }
  };
  // Lane p knows where in a stage's x that of place p is.
  static_assert(S::columns <= 256, "a lane a place");
  const int its_run = lane / 8 % W::runs, its_piece = lane / (8 * W::runs) * 4 + t;
  const int its_unit = its_piece / W::block_pieces * W::block_elements + W::position(its_piece % W::block_pieces, its_run);
  const int its_x = (its_unit / 8 + lane / 4 % 2) * args.n_rows;
  const uint4* x = args.x + (size_t)blockIdx.y * N + lane;
  auto copy_x = [&](int stage, int buffer) {
    if (stage < end) {
      const uint4* from = x + (size_t)stage * (S::columns / 8) * args.n_rows;
      const uint32_t to = base + buffer * stage_bytes + 16 * lane;
#pragma unroll 1
      for (int p = warp; p < S::columns / 8; p += warps) {
        const uint4* row = from + __shfl_sync(0xffffffffu, its_x, p);
#pragma unroll
        for (int r = 0; r < N; r += 32) {
          if (r + 32 <= N || lane < N % 32) copy16(to + p * S::place + 16 * r, row + r, true);
        }
      }
    }
    commit_copies();
  };

  for (int i = 0; i < args.stages - 1; ++i) copy_w(begin + i, i);
  let_successor_start();
  wait_for_predecessor();
  for (int i = 0; i < args.stages - 1; ++i) copy_x(begin + i, i);

  float sum[N / 8][4] = {};
  int buffer = 0;
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
    copy_w(stage + args.stages - 1, free);
    copy_x(stage + args.stages - 1, free);

    const uint32_t w0 = base + buffer * stage_bytes + own, w1 = w0 + 8 * S::slot;
    const uint32_t early0 = S::alike ? 0 : (low_bits(row0) + (uint32_t)stage * S::bytes) & 15;
    const uint32_t early1 = S::alike ? 0 : (low_bits(row1) + (uint32_t)stage * S::bytes) & 15;
    const uint8_t* x_stage = shared + buffer * stage_bytes + t * S::place + 16 * g;
    const int left = args.n_in - stage * S::columns;
#pragma unroll 1
    for (int slice = 0; slice < S::slices; ++slice) {
      const int piece = 4 * slice + t, within = piece % W::block_pieces;
      typename W::Parts a0, a1;
      {
        typename W::Raw raw0 = {}, raw1 = {};
        if (16 * W::runs * piece < left) {
          const int at = piece / W::block_pieces, rest = left - at * W::block_elements;
          raw0 = W::fetch(SharedBytes{w0 + early0 + at * W::block_bytes}, within, rest, aligned);
          raw1 = W::fetch(SharedBytes{w1 + early1 + at * W::block_bytes}, within, rest, aligned);
        }
        W::unpack(raw0, within, a0);
        W::unpack(raw1, within, a1);
      }
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
      const uint8_t* x_slice = x_stage + slice * (8 * W::runs) * S::place;
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
          W::to_half(a0, j * W::group + k, inverse0, h0[k]);
          W::to_half(a1, j * W::group + k, inverse1, h1[k]);
#pragma unroll
          for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(h0[k][i]), "+r"(h1[k][i]));  // here, not earlier
        }
        // Two or three products side by side: one alone would wait for itself.
        constexpr int at_once = N / 8 % 2 ? 3 : 2;
#pragma unroll
        for (int n = 0; n < N / 8; n += at_once) {
          float c[at_once][4] = {};
#pragma unroll
          for (int half = 0; half < 2 * W::group; ++half) {
            uint4 b[at_once];
            const uint32_t(&u)[8] = h0[half / 2], (&v)[8] = h1[half / 2];
            const int q = half % 2 * 4;
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
              if (n + i < N / 8) {
                b[i] = *reinterpret_cast<const uint4*>(x_slice + 4 * (2 * W::group * j + half) * S::place + 128 * (n + i));
              }
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
              if (n + i < N / 8) mma(c[i], {u[q], v[q], u[q + 1], v[q + 1]}, b[i].x, b[i].y);
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
              if (n + i < N / 8) mma(c[i], {u[q + 2], v[q + 2], u[q + 3], v[q + 3]}, b[i].z, b[i].w);
            }
          }
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            if (n + i < N / 8) {
              sum[n + i][0] = fmaf(c[i][0], power0, sum[n + i][0]);
              sum[n + i][1] = fmaf(c[i][1], power0, sum[n + i][1]);
              sum[n + i][2] = fmaf(c[i][2], power1, sum[n + i][2]);
              sum[n + i][3] = fmaf(c[i][3], power1, sum[n + i][3]);
            }
          }
        }
      }
    }
    buffer = buffer + 1 == args.stages ? 0 : buffer + 1;
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
#pragma unroll 1
  for (int i = lane; i < 16 * N; i += 32) {
    const int r = i % 16, m = blockIdx.y * N + i / 16, side = args.swiglu ? r / 8 : 0, row = first + r - 8 * side;
    if (row > last || m >= args.m) continue;
    const float* from = sums + i / 16 * stride + r;
    if (args.sums) {
      args.sums[((size_t)blockIdx.z * args.m + m) * args.n_sum + place + side * gate.n_out + row] = *from;
    } else if (!side) {
      put(gate, args.swiglu ? &other : nullptr, row, m, args.x_scale[m], from[0], from[8]);
    }
  }
}

}  // namespace reflex

// One block a multiprocessor, said where the compiler would spare registers for a second and spill.
#define REFLEX_FEW(NAME, FORMAT, N)                                                             \
  extern "C" __global__ void __launch_bounds__((reflex::few_threads<reflex::FORMAT, N>),        \
                                               (reflex::few_threads<reflex::FORMAT, N> == 512)) \
      NAME(const __grid_constant__ reflex::FewArgs args) {                                      \
    reflex::few<reflex::FORMAT, N>(args);                                                       \
  }
