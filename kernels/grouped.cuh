// Experts for many tokens: out[s] = W[expert of s] x[s] for slots s (a token's choices, one after the other), which
// `group_experts` (experts.cu) has put into tiles of 32 slots of one expert. So weights are read and dequantised once a
// tile, on tensor cores, without the host knowing who was chosen.
//
// As in matmul.cuh a warp multiplies 16 rows of W with 32 rows of x, and weights go from memory into its registers. But
// rows of x are gathered: they lie one after the other, 32 bytes of each are read at a time. And since a router may
// depend on the result, x and quantised weights come as two halves, what fits one and the rest: x W + rest x W + x rest
// W, of which at most 2^-22 is lost.
//
// Layout: `split` of a block's 4 warps share the columns of a tile of 16 rows; their sums are added in a fixed order.
// Launch: 128 threads, blockIdx.x is a block of `4 / split` tiles of rows, blockIdx.y a tile of slots; those beyond the
// last one return.
#pragma once

#include "operand.cuh"

namespace reflex {

struct GroupedArgs {
  const uint4* x;        // halves (rows, 2, n_padded), n_padded the next multiple of 256 of n_in
  const float* x_scale;  // (rows)
  const int* expert;     // of each tile of slots, or -1
  const int* slots;      // (tiles, 32), -1 where a tile is not full
  const uint8_t* weight;
  uint64_t expert_bytes;  // from one expert's matrix to the next
  float* out;             // (slots, n_out)
  int share;              // slots that have a row of x in common
  int n_in, n_out;
  int split_log2;
};

constexpr int grouped_threads = 128;
constexpr int grouped_tile = 32;

template <class Format>
__device__ __forceinline__ void grouped(const GroupedArgs& args) {
  using W = Operand<Format>;
  constexpr int N = grouped_tile, warps = grouped_threads / 32, stride = 20;  // no two of a warp's accumulators fall into one bank
  __shared__ float sums[warps * N * stride];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int split = 1 << args.split_log2, part = warp & (split - 1), group = warp >> args.split_log2;
  const int first = (blockIdx.x * (warps >> args.split_log2) + group) * 16, last = args.n_out - 1;

  wait_for_predecessor();
  const int expert = args.expert[blockIdx.y];
  if (expert < 0) return;
  const int* slots = args.slots + blockIdx.y * N;
  const size_t bytes = row_bytes<Format>(args.n_in);
  const bool aligned = bytes % 16 == 0;
  const uint8_t* weight = args.weight + expert * args.expert_bytes;
  const uint8_t* row0 = weight + (size_t)min(first + g, last) * bytes;
  const uint8_t* row1 = weight + (size_t)min(first + g + 8, last) * bytes;
  const int n_pieces = (args.n_in + 16 * W::runs - 1) / (16 * W::runs), n_slices = (n_pieces + 3) / 4;
  const int plane = (args.n_in + 255) / 256 * 32;  // in units of 8 columns
  uint32_t x_row[N / 8];                           // of slots g, g + 8, ..
#pragma unroll
  for (int n = 0; n < N / 8; ++n) x_row[n] = max(slots[8 * n + g], 0) / args.share * 2 * plane;

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
  fetch(part);

  float sum[N / 8][4] = {};
#pragma unroll 1
  for (int slice = part; slice < n_slices; slice += split) {
    typename W::Parts a0, a1;
    const int piece = 4 * slice + t, within = piece % W::block_pieces;
    W::unpack(next[0], within, a0);
    W::unpack(next[1], within, a1);
    fetch(slice + split);
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
      uint32_t h0[8], h1[8], low0[8], low1[8];
      W::to_half(a0, k, inverse0, h0);
      W::to_half(a1, k, inverse1, h1);
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(h0[i]), "+r"(h1[i]));  // here, not earlier: registers are dear
      if constexpr (!is_float<Format>) {
        W::rest(a0, k, inverse0, h0, low0);
        W::rest(a1, k, inverse1, h1, low1);
#pragma unroll
        for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(low0[i]), "+r"(low1[i]));
      }
      const int unit = (piece / W::block_pieces * W::block_elements + W::position(within, k)) / 8;
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
        const uint4* x = args.x + x_row[n] + unit;
        float c[4] = {};
        auto multiply = [&](const uint32_t(&a)[8], const uint32_t(&b)[8], int i, const uint4& y) {
          mma(c, {a[4 * i], b[4 * i], a[4 * i + 1], b[4 * i + 1]}, y.x, y.y);
          mma(c, {a[4 * i + 2], b[4 * i + 2], a[4 * i + 3], b[4 * i + 3]}, y.z, y.w);
        };
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 high = load_now(x + i), low = load_now(x + plane + i);
          multiply(h0, h1, i, low);
          if constexpr (!is_float<Format>) multiply(low0, low1, i, high);
          multiply(h0, h1, i, high);
        }
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
  for (int i = 32 * part + lane; i < N * 16; i += 32 * split) {
    const int r = i % 16, place = i / 16, row = first + r, slot = slots[place];
    if (row > last || slot < 0) continue;
    const float* from = sums + (group * split * N + place) * stride + r;
    float v = 0;
#pragma unroll 1
    for (int p = 0; p < split; ++p) v += from[p * N * stride];
    args.out[(size_t)slot * args.n_out + row] = v * args.x_scale[slot / args.share];
  }
}

}  // namespace reflex

#define REFLEX_GROUPED(NAME, FORMAT)                                       \
  extern "C" __global__ void __launch_bounds__(reflex::grouped_threads, 2) \
      NAME(const __grid_constant__ reflex::GroupedArgs args) {             \
    reflex::grouped<reflex::FORMAT>(args);                                 \
  }
