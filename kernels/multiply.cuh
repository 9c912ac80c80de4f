// A stage of few.cuh multiplied: k-quants as whole numbers (whole.cuh), by four warps together or by a warp alone, the
// others in runs divided by powers of two (operand.cuh).
#pragma once

#include "stage.cuh"

namespace reflex {

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

}  // namespace reflex
