// A few rows x at once: out[t] = W x[t] on tensor cores, W dequantised on the way into registers.
//
// A warp multiplies 16 rows of W with N rows of x (8 or 16). Lane 4 g + t reads pieces (dequant.cuh) t, t + 4,
// ... of rows g and g + 8. The columns of a sum may come in any order as long as both factors agree on it: a
// tensor-core step multiplies 4 elements that each of the 4 lanes of a row already has, so weights never pass through
// shared memory. Rows of x come as halves, each divided by its own power of two (rows.cu), 8 elements of all rows side
// by side: (n_in / 8, n_rows, 8), zero beyond the real ones. Every run of weights is divided by a power of two that the
// 4 lanes agree on (operand.cuh); products of a run are summed by the tensor core and added to float32 sums times that
// power.
//
// Layout: `split` of a block's 8 warps share the columns of a tile; their sums are added in a fixed order through
// shared memory. Launch: 256 threads, a block a `8 / split` tiles of 16 rows (SwiGLU: 8 gate rows and their 8 up rows);
// blockIdx.y is a block of N rows of x.
#pragma once

#include "operand.cuh"

namespace reflex {

struct MatmulArgs {
  const uint4* x;        // halves (n_padded / 8, n_rows, 8), n_padded the next multiple of 256 of n_in
  const float* x_scale;  // (n_rows)
  int m;                 // rows of x that count
  int n_rows;            // a multiple of N
  int n_in;
  int n_matrix;
  int swiglu;
  int split_log2;
  Matrix matrix[max_matrices];
};

constexpr int matmul_threads = 256;
constexpr int matmul_warps = 8;

// Blocks a multiprocessor holds at once: two where their registers suffice.
template <class Format, int N>
constexpr int matmul_blocks = N <= 16 && N * Operand<Format>::runs <= 64 ? 2 : 1;

template <class Format, int N>
__device__ __forceinline__ void matmul(const MatmulArgs& args) {
  using W = Operand<Format>;
  constexpr int stride = 20;  // floats a row of x in shared memory: no two of a warp's accumulators fall into one bank
  __shared__ float sums[matmul_warps * N * stride];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int split = 1 << args.split_log2, part = warp & (split - 1), group = warp >> args.split_log2;
  const int groups = matmul_warps >> args.split_log2, yield = args.swiglu ? 8 : 16;

  int tile = blockIdx.x * groups + group, which = 0;
  if (!args.swiglu) {
    auto blocks = [&](int i) { return (args.matrix[i].n_out + yield * groups - 1) / (yield * groups); };
    int block = blockIdx.x;
    while (block >= blocks(which)) block -= blocks(which++);
    tile = block * groups + group;
  }
  const Matrix& gate = args.matrix[which];
  const Matrix& other = args.matrix[args.swiglu ? 1 : which];
  const size_t bytes = row_bytes<Format>(args.n_in);
  const bool aligned = bytes % 16 == 0;
  const int first = tile * yield, last = gate.n_out - 1;
  const uint8_t* row0 = gate.weight + (size_t)min(first + g, last) * bytes;
  const uint8_t* row1 = other.weight + (size_t)min(args.swiglu ? first + g : first + g + 8, last) * bytes;
  const int n_pieces = (args.n_in + 16 * W::runs - 1) / (16 * W::runs), n_slices = (n_pieces + 3) / 4;

  typename W::Raw next[2];
  auto fetch = [&](int slice) {
    const int piece = 4 * slice + t;
    if (slice < n_slices && piece < n_pieces) {
      const size_t at = (size_t)(piece / W::block_pieces) * W::block_bytes;
      const int left = args.n_in - piece / W::block_pieces * W::block_elements;
      next[0] = W::fetch(row0 + at, piece % W::block_pieces, left, aligned);
      next[1] = W::fetch(row1 + at, piece % W::block_pieces, left, aligned);
    } else {
      next[0] = next[1] = {};
    }
  };

  if (N == 8) let_successor_start();  // with more rows the successor's blocks would be in the way
  fetch(part);
  wait_for_predecessor();

  const uint4* x = args.x + (size_t)blockIdx.y * N + g;
  float sum[N / 8][4] = {};
#pragma unroll 1
  for (int slice = part; slice < n_slices; slice += split) {
    typename W::Parts a0, a1;
    const int piece = 4 * slice + t, within = piece % W::block_pieces;
    W::unpack(next[0], within, a0);
    W::unpack(next[1], within, a1);
    fetch(slice + split);
    // x of run k and eight rows n is loaded while the one before is multiplied; volatile, so that no more are at a
    // time.
    uint4 b[2][2];
    auto load = [&](int k, int n, uint4(&to)[2]) {
      const int unit = (piece / W::block_pieces * W::block_elements + W::position(within, k)) / 8;
      to[0] = load_now(x + (size_t)unit * args.n_rows + 8 * n);
      to[1] = load_now(x + (size_t)(unit + 1) * args.n_rows + 8 * n);
    };
    load(0, 0, b[0]);
#pragma unroll
    for (int k = 0; k < W::runs; ++k) {
      float power0 = 1, power1 = 1, inverse0 = 1, inverse1 = 1;
      if constexpr (W::is_scaled) {
        uint32_t b0 = W::bound(a0, k), b1 = W::bound(a1, k);
#pragma unroll
        for (int d = 1; d <= 2; d *= 2) {
          b0 = max(b0, __shfl_xor_sync(0xffffffffu, b0, d));
          b1 = max(b1, __shfl_xor_sync(0xffffffffu, b1, d));
        }
        power0 = power_above(b0), power1 = power_above(b1);
        inverse0 = reciprocal_of_power(power0), inverse1 = reciprocal_of_power(power1);
      }
      uint32_t h0[8], h1[8];
      W::to_half(a0, k, inverse0, h0);
      W::to_half(a1, k, inverse1, h1);
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(h0[i]), "+r"(h1[i]));  // here, not earlier: registers are dear
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
        const int now = (k * (N / 8) + n) % 2;
        if (n + 1 < N / 8) {
          load(k, n + 1, b[1 - now]);
        } else if (k + 1 < W::runs) {
          load(k + 1, 0, b[1 - now]);
        }
        float c[4] = {};
        mma(c, {h0[0], h1[0], h0[1], h1[1]}, b[now][0].x, b[now][0].y);
        mma(c, {h0[2], h1[2], h0[3], h1[3]}, b[now][0].z, b[now][0].w);
        mma(c, {h0[4], h1[4], h0[5], h1[5]}, b[now][1].x, b[now][1].y);
        mma(c, {h0[6], h1[6], h0[7], h1[7]}, b[now][1].z, b[now][1].w);
        sum[n][0] = fmaf(c[0], power0, sum[n][0]);
        sum[n][1] = fmaf(c[1], power0, sum[n][1]);
        sum[n][2] = fmaf(c[2], power1, sum[n][2]);
        sum[n][3] = fmaf(c[3], power1, sum[n][3]);
      }
    }
  }

#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    float* to = sums + (warp * N + 8 * n + 2 * t) * stride + g;
    to[0] = sum[n][0], to[stride] = sum[n][1], to[8] = sum[n][2], to[stride + 8] = sum[n][3];
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 32 * part + lane; i < N * yield; i += 32 * split) {
    const int r = i % yield, token = i / yield, row = first + r, m = blockIdx.y * N + token;
    if (row > last || m >= args.m) continue;
    const float* from = sums + (group * split * N + token) * stride + r;
    const float scale = args.x_scale[m];
    float v = 0;
#pragma unroll 1
    for (int p = 0; p < split; ++p) v += from[p * N * stride];
    v *= scale;
    if (gate.bias) v += gate.bias[row];
    if (args.swiglu) {
      float up = 0;
#pragma unroll 1
      for (int p = 0; p < split; ++p) up += from[p * N * stride + 8];
      up *= scale;
      if (other.bias) up += other.bias[row];
      v = silu(v) * up;
    }
    const size_t at = (size_t)m * gate.out_stride + row;
    if (gate.residual) v += gate.residual[at];
    gate.out[at] = v;
  }
}

// W as halves for gemm_half: row r goes to row r * row_step + row_first, divided by a power of two that bounds it,
// zeros up to `stride`. With two planes what the halves lose follows behind each row, as halves again. Launch: 256
// threads, a warp a row.
struct WidenArgs {
  const uint8_t* weight;
  uint4* out;    // halves (.., planes, stride)
  float* scale;  // (..): the powers of two
  int n_out, n_in;
  int stride;  // halves, a multiple of 256
  int row_step, row_first;
  int planes;
};

template <class Format>
__device__ __forceinline__ void widen(const WidenArgs& args) {
  using W = Operand<Format>;
  const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
  wait_for_predecessor();
  if (row >= args.n_out) return;
  const size_t bytes = row_bytes<Format>(args.n_in);
  const uint8_t* weight = args.weight + (size_t)row * bytes;
  const bool aligned = bytes % 16 == 0;
  const int n_pieces = (args.n_in + 16 * W::runs - 1) / (16 * W::runs), to = row * args.row_step + args.row_first;
  auto fetch = [&](int piece) {
    const int block = piece / W::block_pieces;
    return W::fetch(weight + (size_t)block * W::block_bytes, piece % W::block_pieces,
                    args.n_in - block * W::block_elements, aligned);
  };

  float power = 1;
  if constexpr (W::is_scaled) {
    uint32_t most = 0;
#pragma unroll 2
    for (int piece = lane; piece < n_pieces; piece += 32) {
      typename W::Parts parts;
      W::unpack(fetch(piece), piece % W::block_pieces, parts);
#pragma unroll
      for (int k = 0; k < W::runs; ++k) most = max(most, W::bound(parts, k));
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    power = power_above(most);
  }
  if (lane == 0) args.scale[to] = power;
  const float inverse = reciprocal_of_power(power);
  // 32 pieces are neighbours: through shared memory, so that a warp writes them in order. Pairs of a row's 8-element
  // units are put in places that do not meet in a bank.
  constexpr int units = 2 * W::runs * 32;
  __shared__ uint4 staged[8][units];
  uint4* mine = staged[threadIdx.x / 32];
  auto place = [](int unit) { return unit ^ (unit >> 3 & 7); };
#pragma unroll 1
  for (int plane = 0; plane < args.planes; ++plane) {
    uint4* out = args.out + ((size_t)to * args.planes + plane) * (args.stride / 8);
#pragma unroll 1
    for (int base = 0; base < n_pieces; base += 32) {
      const int piece = base + lane;
      typename W::Raw raw = {};
      if (piece < n_pieces) raw = fetch(piece);
      typename W::Parts parts;
      W::unpack(raw, piece % W::block_pieces, parts);
#pragma unroll
      for (int k = 0; k < W::runs; ++k) {
        uint32_t h[8];
        W::to_half(parts, k, inverse, h);
        if constexpr (!W::is_lossless) {
          if (plane) {
            uint32_t low[8];
            W::rest(parts, k, inverse, h, low);
#pragma unroll
            for (int i = 0; i < 8; ++i) h[i] = low[i];
          }
        }
        const int unit = (lane / W::block_pieces * W::block_elements + W::position(lane % W::block_pieces, k)) / 8;
        mine[place(unit)] = make_uint4(h[0], h[1], h[2], h[3]);
        mine[place(unit + 1)] = make_uint4(h[4], h[5], h[6], h[7]);
      }
      __syncwarp();
      const int first = base * 2 * W::runs;
#pragma unroll
      for (int i = lane; i < units; i += 32) {
        if (first + i < args.stride / 8) out[first + i] = mine[place(i)];
      }
      __syncwarp();
    }
    const int done = (n_pieces + 31) / 32 * units;
    for (int unit = done + lane; unit < args.stride / 8; unit += 32) out[unit] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace reflex

#define REFLEX_MATMUL(NAME, FORMAT, N)                                                                           \
  extern "C" __global__ void __launch_bounds__(reflex::matmul_threads, reflex::matmul_blocks<reflex::FORMAT, N>) \
      NAME(const __grid_constant__ reflex::MatmulArgs args) {                                                    \
    reflex::matmul<reflex::FORMAT, N>(args);                                                                     \
  }

#define REFLEX_WIDEN(NAME, FORMAT)                                                                         \
  extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ reflex::WidenArgs args) { \
    reflex::widen<reflex::FORMAT>(args);                                                                   \
  }
