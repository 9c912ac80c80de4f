// Rows of activations for the matrix products of more than one row.
//
// prepare_rows: float32 rows -> halves, RMS-normalised on the way if asked for. Activations pass 65504, the end of half
// precision: every row is divided by a power of two (kept in `scale`) that brings its greatest magnitude to 2^14 ..
// 2^15, which also leaves 2^29 below it before precision is lost. NaN and infinity stay what they are. With a low plane
// what the halves lose is kept too, as halves again: 22 bits in all.
// prepare_float_rows: the normalised rows as float32, for float32 weights.
// add_parts: the sums of parts of the columns (few.cuh), added in order, to the result. Launch: 256 threads, grid
// (ceil(rows of all matrices / 256), m), with SwiGLU those of one.
//
// Launch: 256 threads, a block a row of the result; rows from `m` on are zeros. `n_padded` is a multiple of 8.
#include "linear.cuh"
#include "mma.cuh"

namespace reflex {

struct RowsArgs {
  const float* x;     // (m, x_stride)
  const float* norm;  // (n) or null
  void* out;          // 8 halves of row r from column 8 u on are at out + 16 (u * unit_step + r * row_step) bytes;
                      // float32: (m, n_padded)
  float* scale;       // (rows)
  int m, n, x_stride, n_padded;
  int unit_step, row_step;
  float eps;
  int low;  // from the halves of 8 columns to what they lost, in 16 bytes; or 0: not wanted
};

constexpr int rows_threads = 256;

}  // namespace reflex

using namespace reflex;

extern "C" __global__ void __launch_bounds__(rows_threads) prepare_rows(const __grid_constant__ RowsArgs args) {
  __shared__ float partial[rows_threads / 32];
  __shared__ uint32_t most_of[rows_threads / 32];
  const int row = blockIdx.x;
  uint4* out = static_cast<uint4*>(args.out) + (size_t)row * args.row_step;
  let_successor_start();
  wait_for_predecessor();
  if (row >= args.m) {
    for (int unit = threadIdx.x; unit < args.n_padded / 8; unit += rows_threads) {
      out[(size_t)unit * args.unit_step] = make_uint4(0, 0, 0, 0);
      if (args.low) out[(size_t)unit * args.unit_step + args.low] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) args.scale[row] = 0;
    return;
  }
  const float* x = args.x + (size_t)row * args.x_stride;
  const float factor = args.norm ? inverse_rms<rows_threads>(x, args.n, args.eps, partial) : 1.0f;
  auto value = [&](int i) { return args.norm ? x[i] * factor * __ldg(args.norm + i) : x[i]; };

  uint32_t most = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < args.n; i += rows_threads) most = max(most, magnitude(value(i)));
#pragma unroll
  for (int d = 16; d; d >>= 1) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
  if (threadIdx.x % 32 == 0) most_of[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < rows_threads / 32; ++i) most = max(most, most_of[i]);
  const float power = fmaxf(power_above(most), 0x1p-96f);  // so that 2^15 / power is finite
  const float inverse = 0x1p15f * reciprocal_of_power(power);
  if (threadIdx.x == 0) args.scale[row] = power * 0x1p-15f;

  for (int unit = threadIdx.x; unit < args.n_padded / 8; unit += rows_threads) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 8 * unit + i < args.n ? value(8 * unit + i) * inverse : 0.0f;
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = pack_halves(v[2 * i], v[2 * i + 1]);
    uint4* to = out + (size_t)unit * args.unit_step;
    *to = make_uint4(h[0], h[1], h[2], h[3]);
    if (args.low) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = v[2 * i] - half_bits(h[i] & 0xffff), b = v[2 * i + 1] - half_bits(h[i] >> 16);
        // Of infinity and NaN nothing is left: the halves have all of it.
        h[i] = pack_halves(magnitude(a) < 0x7f800000u ? a : 0.0f, magnitude(b) < 0x7f800000u ? b : 0.0f);
      }
      to[args.low] = make_uint4(h[0], h[1], h[2], h[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(rows_threads) prepare_float_rows(const __grid_constant__ RowsArgs args) {
  __shared__ float partial[rows_threads / 32];
  let_successor_start();
  wait_for_predecessor();
  const float* x = args.x + (size_t)blockIdx.x * args.x_stride;
  float* out = static_cast<float*>(args.out) + (size_t)blockIdx.x * args.n_padded;
  const float factor = inverse_rms<rows_threads>(x, args.n, args.eps, partial);
  for (int i = threadIdx.x; i < args.n; i += rows_threads) out[i] = x[i] * factor * __ldg(args.norm + i);
}

extern "C" __global__ void __launch_bounds__(rows_threads) add_parts(const __grid_constant__ FewArgs args) {
  int row = blockIdx.x * rows_threads + threadIdx.x;
  const int m = blockIdx.y;
  let_successor_start();
  wait_for_predecessor();
  if (row >= (args.swiglu ? args.matrix[0].n_out : args.n_sum)) return;
  auto sum = [&](int i) {
    const float* from = args.sums + (size_t)m * args.n_sum + i;
    float v = 0;
#pragma unroll 4
    for (int part = 0; part < args.parts; ++part) v += from[(size_t)part * args.m * args.n_sum];
    return v;
  };
  const float v = sum(row), w = args.swiglu ? sum(row + args.matrix[0].n_out) : 0.0f;
  int which = 0;
  while (row >= args.matrix[which].n_out) row -= args.matrix[which++].n_out;
  put(args.matrix[which], args.swiglu ? &args.matrix[1] : nullptr, row, m, args.x_scale[m], v, w);
}
