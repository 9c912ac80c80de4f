// What the kernels of the matrix products share: their argument structures (packed by products.py and its neighbours in
// reflex_ipc/cuda), formats whose weights are floats already, and small device helpers.
#pragma once

#include "dependent.cuh"
#include "dequant.cuh"

namespace reflex {

constexpr int max_matrices = 4;

// One weight and where its product goes.
struct Matrix {
  const uint8_t* weight;  // n_out rows of the format's blocks, 32-byte aligned
  float* out;             // (M, out_stride)
  const float* bias;      // (n_out) or null
  const float* residual;  // (M, out_stride) or null; may be `out`
  uint64_t expert_bytes;  // from one expert's matrix to the next
  int n_out, out_stride;
};

struct FewArgs {  // few.cuh
  const uint4* x;        // pages (n_rows / N, ceil(n_in / 256), page_chunks(N)): pages.cuh
  const float* x_scale;  // (n_rows)
  float* sums;           // (tiles, parts, warps, N, 16), not yet times x_scale; not used where a cluster adds parts up
  int* arrived;          // (tiles): parts of a tile that have written their sums
  int m;                 // rows of x that count
  int n_in;
  int n_matrix;
  int swiglu;
  int part_stages;  // of each part of the columns but the last
  int stages;       // in shared memory, 2 to 4
  Matrix matrix[max_matrices];
};

// --- floats: the memory side of F32, F16 and BF16 ------------------------------------------------------------------

struct F32 {
  static constexpr int bytes = 4;
  static __device__ __forceinline__ float element(uint32_t bits) { return __uint_as_float(bits); }
};
struct F16 {
  static constexpr int bytes = 2;
  static __device__ __forceinline__ float element(uint32_t bits) { return half_bits(bits); }
};
struct BF16 {
  static constexpr int bytes = 2;
  static __device__ __forceinline__ float element(uint32_t bits) { return __uint_as_float(bits << 16); }
};

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
template <class Format>
constexpr bool is_float = is_same<Format, F32>::value || is_same<Format, F16>::value || is_same<Format, BF16>::value;

// Bytes of a row of n elements.
template <class Format>
__device__ __forceinline__ size_t row_bytes(int n) {
  if constexpr (is_float<Format>) {
    return (size_t)n * Format::bytes;
  } else {
    return (size_t)(n / Format::elements) * Format::bytes;
  }
}

// 16 bytes of floats, zeros past the `left` elements that are there. `aligned`: rows are whole 16-byte words.
template <class Format, class Bytes>
__device__ __forceinline__ void load_floats(Bytes p, int left, bool aligned, Words<4, 16>& out) {
  if (aligned && left > 0) {
    out.load(p);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Format::bytes == 4) {
      out.w[i] = i < left ? word_at(p + 4 * i) : 0;
    } else {
      out.w[i] = 2 * i < left ? load16(p + 4 * i) : 0;
      if (2 * i + 1 < left) out.w[i] |= load16(p + (4 * i + 2)) << 16;
    }
  }
}

// --- arithmetic ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Bits of |x|: they order as magnitudes do, with infinities and then NaN on top, so that a maximum keeps a NaN.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// A power of two above the number with these magnitude bits (at most twice it), and its reciprocal. Infinity and NaN
// get a finite one: they stay what they are when multiplied by the reciprocal.
__device__ __forceinline__ float power_above(uint32_t bits) {
  const uint32_t above = (bits & 0x7f800000u) + 0x00800000u;
  return __uint_as_float(above < 0x7e800000u ? above : 0x7e800000u);
}
__device__ __forceinline__ float reciprocal_of_power(float power) {
  return __uint_as_float(0x7f000000u - __float_as_uint(power));
}

// 1 / sqrt(mean(x^2) + eps) over a row of n, the same in every thread of the block; `sum` is this thread's share of the
// squares. `partial`: a float a warp.
template <int threads>
__device__ __forceinline__ float inverse_rms(float sum, int n, float eps, float* partial) {
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int i = 0; i < threads / 32; ++i) sum += partial[i];
  return rsqrtf(sum / (float)n + eps);
}

// The same of the row itself.
template <int threads>
__device__ __forceinline__ float inverse_rms(const float* x, int n, float eps, float* partial) {
  float sum = 0;
  if ((reinterpret_cast<uintptr_t>(x) & 15) == 0) {
    const int n4 = n / 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < n4; i += threads) {
      const float4 v = reinterpret_cast<const float4*>(x)[i];
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
#pragma unroll 1
    for (int i = 4 * n4 + threadIdx.x; i < n; i += threads) sum += x[i] * x[i];
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += threads) sum += x[i] * x[i];
  }
  return inverse_rms<threads>(sum, n, eps, partial);
}

}  // namespace reflex
