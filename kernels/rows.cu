// Rows of activations for the matrix products of more than one row.
//
// prepare_rows: float32 rows -> halves, RMS-normalised on the way if asked for. Activations pass 65504, the end of half
// precision: every row is divided by a power of two (kept in `scale`) that brings its greatest magnitude to 2^14 ..
// 2^15, which also leaves 2^29 below it before precision is lost. NaN and infinity stay what they are. With a low plane
// what the halves lose is kept too, as halves again: 22 bits in all.
// prepare_float_rows: the normalised rows as float32, for float32 weights.
// prepare_pages: the same for few.cuh, in pages of 256 columns and with sums over every 32 (pages.cuh).
//
// Launch: 256 threads (prepare_pages: 512), a block a row of the result; rows from `m` on are zeros. `n_padded` is a
// multiple of 8.
#include "linear.cuh"
#include "mma.cuh"
#include "pages.cuh"

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

struct PagesArgs {
  const float* x;     // (m, x_stride)
  const float* norm;  // (n) or null
  uint4* pages;       // (rows / page_rows, n_pages, page_chunks(page_rows))
  float* scale;       // (rows)
  int* zeros;         // (n_zeros): set to 0
  int m, n, x_stride, n_pages, page_rows, n_zeros;
  float eps;
  int is_whole;  // for weights of whole.cuh
};

constexpr int pages_threads = 512;
constexpr int pages_kept = 3;  // units of 8 columns that a thread keeps in registers: 12288 columns a row

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

extern "C" __global__ void __launch_bounds__(pages_threads) prepare_pages(const __grid_constant__ PagesArgs args) {
  __shared__ float partial[pages_threads / 32];
  __shared__ uint32_t most_of[pages_threads / 32];
  const int row = blockIdx.x, n_units = args.n_pages * (page_columns / 8);
  const bool exists = row < args.m;
  const float* x = args.x + (size_t)row * args.x_stride;
  auto read = [&](const float* from, int unit, float(&v)[8]) {
    from += 8 * unit;
    if (8 * unit + 8 <= args.n && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {
      const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = 8 * unit + i < args.n ? from[i] : 0.0f;
    }
  };
  let_successor_start();
  float norm[pages_kept][8] = {}, value[pages_kept][8] = {};
  if (exists && args.norm) {
#pragma unroll
    for (int k = 0; k < pages_kept; ++k) read(args.norm, threadIdx.x + k * pages_threads, norm[k]);
  }
  wait_for_predecessor();
  for (int i = row * pages_threads + threadIdx.x; i < args.n_zeros; i += gridDim.x * pages_threads) args.zeros[i] = 0;

  float factor = 1.0f, power = 0.0f, inverse = 0.0f;
  if (exists) {
    float squares = 0;
    uint32_t most = 0;
    auto look = [&](float(&v)[8], const float(&w)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        squares += v[i] * v[i];
        if (args.norm) v[i] *= w[i];
        most = max(most, magnitude(v[i]));
      }
    };
#pragma unroll
    for (int k = 0; k < pages_kept; ++k) read(x, threadIdx.x + k * pages_threads, value[k]);
#pragma unroll
    for (int k = 0; k < pages_kept; ++k) look(value[k], norm[k]);
#pragma unroll 1
    for (int unit = threadIdx.x + pages_kept * pages_threads; unit < n_units; unit += pages_threads) {
      float v[8], w[8] = {};
      read(x, unit, v);
      if (args.norm) read(args.norm, unit, w);
      look(v, w);
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    if (threadIdx.x % 32 == 0) most_of[threadIdx.x / 32] = most;
    factor = inverse_rms<pages_threads>(squares, args.n, args.eps, partial);  // a barrier for both
    if (!args.norm) factor = 1.0f;
    most = 0;
#pragma unroll
    for (int i = 0; i < pages_threads / 32; ++i) most = max(most, most_of[i]);
    power = fmaxf(power_above(magnitude(__uint_as_float(most) * factor)), 0x1p-96f);  // so that 2^15 / power is finite
    inverse = 0x1p15f * reciprocal_of_power(power);
  }
  if (threadIdx.x == 0) args.scale[row] = power * 0x1p-15f;

  const int place = row % args.page_rows;
  uint4* pages = args.pages + (size_t)(row / args.page_rows) * args.n_pages * page_chunks(args.page_rows);
  auto write = [&](int unit, const float(&v)[8]) {
    uint32_t h[4];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = i / 2 * 4 + i % 2;  // elements 0 2, 1 3, 4 6, 5 7
      h[i] = pack_halves(v[at] * factor * inverse, v[at + 2] * factor * inverse);
      sum += half_bits(h[i] & 0xffff) + half_bits(h[i] >> 16);
    }
    uint4* page = pages + (size_t)(unit / 32) * page_chunks(args.page_rows);
    const int u = unit % 32;
    if (has_groups && args.is_whole) {
      // Unit 8 r + 2 w + o has, of run r of each lane (whole.cuh), elements 4 w + o and 4 w + o + 2.
      uint32_t woven[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int from = 16 * (t / 2) + 2 * (t % 2) + u / 8 * 4 + u / 4 % 2;
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __shfl_sync(0xffffffffu, h[i], from);
        woven[t] = u % 4 < 2 ? (u % 2 ? words[1] : words[0]) : (u % 2 ? words[3] : words[2]);
      }
      page[u * args.page_rows + place] = make_uint4(woven[0], woven[1], woven[2], woven[3]);
    } else {
      page[u * args.page_rows + (place ^ turn(u))] = make_uint4(h[0], h[1], h[2], h[3]);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    sum *= 1 / page_sum;
    const float next = __shfl_xor_sync(0xffffffffu, sum, 4);
    if (u % 8 == 0) {
      const uint32_t high = pack_halves(sum, next);
      uint32_t* to = reinterpret_cast<uint32_t*>(page + 32 * args.page_rows + place) + u / 8;
      to[0] = high;
      to[4 * args.page_rows] = pack_halves(sum - half_bits(high & 0xffff), next - half_bits(high >> 16));
    }
  };
#pragma unroll
  for (int k = 0; k < pages_kept; ++k) {
    const int unit = threadIdx.x + k * pages_threads;  // whole warps: there are 32 units a page
    if (unit < n_units) write(unit, value[k]);
  }
#pragma unroll 1
  for (int unit = threadIdx.x + pages_kept * pages_threads; unit < n_units; unit += pages_threads) {
    float v[8] = {}, w[8] = {};
    if (exists) {
      read(x, unit, v);
      if (args.norm) {
        read(args.norm, unit, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= w[i];
      }
    }
    write(unit, v);
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
