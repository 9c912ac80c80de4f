// The arithmetic of matrix-vector products: x in shared memory, and a piece of some rows of W times it.
//
// Quantised W: x becomes 16-bit integers q with one scale s per 32 elements, x = s q, |q| <= 127 * 256 + 127, each
// split into two signed bytes, q = 256 high + low. A group of 16 or 32 weights (dequant.cuh) then costs 4-way byte dot
// products, exact in 32-bit integers:
//   sum value * x = scale * s * (256 sum(level high) + sum(level low) - zero sum(q)) + offset * s * sum(q)
// and these are added up in float32. F32, F16, BF16: x stays float32, so do products and sums.
#pragma once

#include "linear.cuh"

namespace reflex {

constexpr int matvec_threads = 256;

// --- x in shared memory --------------------------------------------------------------------------------------------

// Two byte planes in units of 16 elements, and 16 bytes of facts about every 32.
struct Planes {
  uint8_t* high;
  uint8_t* low;
  uint8_t* facts;  // float scale, int sum of q of the first 16, of the second, float scale * both

  __device__ __forceinline__ Planes(uint8_t* shared, int n) {
    const int units = (n + 127) / 128 * 8;
    high = shared;
    low = high + 16 * units;
    facts = low + 16 * units;
  }

  // Byte offset of unit u in a plane: the lanes of a warp read at strides of 1, 2, 4 and 8 units and must not meet in a
  // bank. 32 units further it is 512 bytes further.
  static __device__ __forceinline__ int place(int u) {
    const int line = u >> 3 & 3;
    return (u ^ line ^ line << 1) * 16;
  }

  __device__ __forceinline__ void fill(const float* x, const float* norm, float factor, int n) const {
    for (int base = 0; base < n / 16; base += matvec_threads) {  // in step: neighbours share a scale
      const int unit = base + threadIdx.x;
      const bool there = unit < n / 16;
      float v[16] = {};
      uint32_t most = 0;
      if (there) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float4 f = reinterpret_cast<const float4*>(x)[4 * unit + i];
          if (norm) {
            const float* w = norm + 16 * unit + 4 * i;
            f.x *= factor * __ldg(w), f.y *= factor * __ldg(w + 1), f.z *= factor * __ldg(w + 2),
                f.w *= factor * __ldg(w + 3);
          }
          v[4 * i] = f.x, v[4 * i + 1] = f.y, v[4 * i + 2] = f.z, v[4 * i + 3] = f.w;
          most = max(max(most, max(magnitude(f.x), magnitude(f.y))), max(magnitude(f.z), magnitude(f.w)));
        }
      }
      most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
      // Below 1e-30 the reciprocal would overflow; such a group counts as 0. NaN and infinity live on in the scale.
      const float greatest = __uint_as_float(most);
      const float inverse = greatest < 1e-30f ? 0.0f : 32639.0f / greatest;
      int sum = 0;
      uint32_t high_words[4], low_words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t q[4], h[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int whole = __float2int_rn(v[4 * i + j] * inverse);
          sum += whole;
          q[j] = (uint32_t)whole;
          h[j] = (uint32_t)(whole + 128) >> 8;  // (whole - signed low byte) / 256
        }
        low_words[i] = permute(permute(q[0], q[1], 0x0040), permute(q[2], q[3], 0x0040), 0x5410);
        high_words[i] = permute(permute(h[0], h[1], 0x0040), permute(h[2], h[3], 0x0040), 0x5410);
      }
      const int other = __shfl_xor_sync(0xffffffffu, sum, 1);
      if (there) {
        const int at = place(unit);
        *reinterpret_cast<uint4*>(high + at) = make_uint4(high_words[0], high_words[1], high_words[2], high_words[3]);
        *reinterpret_cast<uint4*>(low + at) = make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
        const float scale = greatest * (1.0f / 32639.0f);
        const int4 all = {__float_as_int(scale), sum, other, __float_as_int(scale * (float)(sum + other))};
        if (unit % 2 == 0) *reinterpret_cast<int4*>(facts + unit / 2 * 16) = all;
      }
    }
  }
};

// float32 in pieces of `piece` elements: four elements of every piece side by side, then the next four.
template <int piece>
struct Plain {
  uint8_t* x;
  int plane;  // bytes

  __device__ __forceinline__ Plain(uint8_t* shared, int n) : x(shared), plane((n + piece - 1) / piece * 16) {}

  __device__ __forceinline__ void fill(const float* from, const float* norm, float factor, int n) const {
    for (int i = threadIdx.x; i < plane / 16 * piece; i += matvec_threads) {
      float v = i < n ? from[i] : 0.0f;
      if (norm && i < n) v *= factor * __ldg(norm + i);
      *reinterpret_cast<float*>(x + i % piece / 4 * plane + i / piece * 16 + i % 4 * 4) = v;
    }
  }
};

// --- a piece of some rows times x ----------------------------------------------------------------------------------
// A tile is 2 or 4 rows of weights. A lane reads the same piece of every so manieth block of each row, `within` its
// place in the block. `Places` is where the x that goes with it is in the first of these blocks; `block(r)` is where
// row r's is.

template <class Format>
struct Quantised {
  using X = Planes;
  static constexpr int rows = rows_at_once<Format>, runs = Format::runs, group = Format::group;
  static constexpr int piece_elements = 16 * runs;
  static constexpr int block_pieces = pieces<Format>, block_bytes = Format::bytes;
  static constexpr int alignment = Format::alignment;
  static constexpr int unit_elements = 16, block_units = Format::elements / 16;

  struct Places {
    int run[runs];  // in the planes
    int facts[runs / group];
    bool odd[runs / group];  // is the run the second half of its 32? (group 1)
  };
  static __device__ __forceinline__ Places places(int within, int unit) {
    Places at;
#pragma unroll
    for (int k = 0; k < runs; ++k) {
      const int u = unit + Format::position(within, k) / 16;
      at.run[k] = Planes::place(u);
      at.facts[k / group] = u / 2 * 16;
      at.odd[k / group] = Format::position(within, k) / 16 % 2;
    }
    return at;
  }

  // Four bytes of levels times four of x.
  static __device__ __forceinline__ int dot(uint32_t q, uint32_t x, int sum) {
    int out;
    if constexpr (Format::is_signed) {
      asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(q), "r"(x), "r"(sum));
    } else {
      asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(q), "r"(x), "r"(sum));
    }
    return out;
  }
  static __device__ __forceinline__ int dot(const uint32_t (&q)[4], const uint4& x, int sum) {
    return dot(q[3], x.w, dot(q[2], x.z, dot(q[1], x.y, dot(q[0], x.x, sum))));
  }

  template <class Block>
  static __device__ __forceinline__ void add(Block block, int within, const X& x, const Places& at, int unit, int, bool,
                                             float (&sum)[rows]) {
    uint4 high[runs], low[runs];
    int4 facts[runs / group];
#pragma unroll
    for (int k = 0; k < runs; ++k) {
      high[k] = *reinterpret_cast<const uint4*>(x.high + 16 * unit + at.run[k]);
      low[k] = *reinterpret_cast<const uint4*>(x.low + 16 * unit + at.run[k]);
    }
#pragma unroll
    for (int j = 0; j < runs / group; ++j) facts[j] = *reinterpret_cast<const int4*>(x.facts + 8 * unit + at.facts[j]);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      RunsOf<Format> w;
      Format::decode(Format::fetch(block(r), within), within, w);
#pragma unroll
      for (int j = 0; j < runs / group; ++j) {
        const float scale = __int_as_float(facts[j].x);
        const int whole = group == 2 ? facts[j].y + facts[j].z : at.odd[j] ? facts[j].z : facts[j].y;
        int d = 0;
        if constexpr (group == 1 || Format::shift(0) == Format::shift(1)) {
#pragma unroll
          for (int k = 0; k < group; ++k) d = dot(w.q[j * group + k], high[j * group + k], d);
          d <<= 8;
#pragma unroll
          for (int k = 0; k < group; ++k) d = dot(w.q[j * group + k], low[j * group + k], d);
          d >>= Format::shift(j * group);
        } else {
#pragma unroll
          for (int k = 0; k < group; ++k) d += dot(w.q[k], low[k], dot(w.q[k], high[k], 0) << 8) >> Format::shift(k);
        }
        if constexpr (Format::zero != 0) d -= Format::zero * whole;
        sum[r] = fmaf(w.scale[j] * scale, (float)d, sum[r]);
        if constexpr (Format::has_offset) {
          sum[r] = fmaf(w.offset[j], group == 2 ? __int_as_float(facts[j].w) : scale * (float)whole, sum[r]);
        }
      }
    }
  }
};

template <class Format>
struct Floating {
  static constexpr int rows = 2;
  static constexpr int piece_elements = 32 / Format::bytes;
  static constexpr int block_pieces = 1, block_bytes = 32, unit_elements = 1, block_units = piece_elements;
  static constexpr int alignment = Format::bytes;
  using X = Plain<piece_elements>;

  struct Places {
    int first;
  };
  static __device__ __forceinline__ Places places(int, int unit) { return {unit / piece_elements * 16}; }

  // `left` elements of the row begin at its block.
  template <class Block>
  static __device__ __forceinline__ void add(Block block, int, const X& x, const Places& at, int unit, int left,
                                             bool aligned, float (&sum)[rows]) {
    float v[piece_elements];
#pragma unroll
    for (int i = 0; i < piece_elements; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(x.x + i / 4 * x.plane + unit / piece_elements * 16 + at.first);
      v[i] = f.x, v[i + 1] = f.y, v[i + 2] = f.z, v[i + 3] = f.w;
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Words<4, 16> w;
        load_floats<Format>(block(r) + 16 * half, left - half * (16 / Format::bytes), aligned, w);
#pragma unroll
        for (int i = 0; i < 16 / Format::bytes; ++i) {
          const uint32_t bits = Format::bytes == 4 ? w[i % 4] : w[i / 2 % 4] >> 16 * (i & 1) & 0xffff;
          sum[r] = fmaf(Format::element(bits), v[half * (16 / Format::bytes) + i], sum[r]);
        }
      }
    }
  }
};

template <class Format, bool floats = is_float<Format>>
struct Choose {
  using type = Quantised<Format>;
};
template <class Format>
struct Choose<Format, true> {
  using type = Floating<Format>;
};
template <class Format>
using Product = typename Choose<Format>::type;

}  // namespace reflex
