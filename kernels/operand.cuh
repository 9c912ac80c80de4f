// Weights as the half-precision operand of tensor cores. A run of 16 elements is divided by a power of two that bounds
// it, so that no exponent is out of range and no block with a small scale next to one with a large scale matters less
// than it should: what is lost is below 2^-24 of the greatest weight around.
//
//   runs, block_pieces, block_bytes, block_elements   as in dequant.cuh
//   group           runs that are divided by the same power of two
//   is_lossless     halves lose nothing that counts
//   is_scaled       false where values are halves as they are: nothing is divided
//   fetch           reads of global or shared memory only; `left` elements of the row begin at the block (floats); Raw{} is all zeros
//   unpack          a Raw to the levels and scales of its runs
//   bound           bits of a magnitude that no element of a run exceeds
//   to_half         a run times `inverse`, in element order or, crossed, of every four elements 0 2 and 1 3
//   rest            what to_half lost of it (only where it is something that counts)
#pragma once

#include "linear.cuh"
#include "mma.cuh"

namespace reflex {

template <class Format, bool floats = is_float<Format>>
struct Operand {
  using Raw = typename Format::Raw;
  using Parts = RunsOf<Format>;
  // Values of NVFP4 have 6 bits and lie between 2^-10 and 2880: halves as they are.
  static constexpr bool is_lossless = is_same<Format, NVFP4>::value, is_scaled = !is_lossless;
  static constexpr int runs = Format::runs, group = is_scaled ? Format::group : runs;
  static constexpr int block_pieces = pieces<Format>, block_bytes = Format::bytes;
  static constexpr int block_elements = Format::elements;

  template <class Bytes>
  static __device__ __forceinline__ Raw fetch(Bytes block, int within, int, bool) {
    return Format::fetch(block, within);
  }
  static __device__ __forceinline__ constexpr int position(int within, int run) {
    return Format::position(within, run);
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, int within, Parts& parts) {
    Format::decode(raw, within, parts);
  }
  static __device__ __forceinline__ uint32_t bound(const Parts& parts, int run) {
    const float b = fabsf(parts.scale[run / Format::group]) * (float)Format::greatest;
    return magnitude(Format::has_offset ? b + fabsf(parts.offset[run / Format::group]) : b);
  }
  template <bool crossed = false>
  static __device__ __forceinline__ void to_half(const Parts& parts, int run, float inverse, uint32_t (&h)[8]) {
    // A byte b under 0x64 is the half 1024 + b: exact, and so is the difference.
    const uint32_t bias = (0x6400 + (Format::is_signed ? 128 : Format::zero << Format::shift(run))) * 0x10001;
    const float s = parts.scale[run / Format::group] * inverse * (1.0f / (1 << Format::shift(run)));
    const float o = parts.offset[run / Format::group] * inverse;
    const uint32_t scale = pack_halves(s, s), offset = pack_halves(o, o);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t q = Format::is_signed ? parts.q[run][i] ^ 0x80808080 : parts.q[run][i];
      const uint32_t low = subtract_halves(permute(q, 0x64646464, crossed ? 0x4240 : 0x4140), bias);
      const uint32_t high = subtract_halves(permute(q, 0x64646464, crossed ? 0x4341 : 0x4342), bias);
      h[2 * i] = Format::has_offset ? fma_halves(low, scale, offset) : multiply_halves(low, scale);
      h[2 * i + 1] = Format::has_offset ? fma_halves(high, scale, offset) : multiply_halves(high, scale);
    }
  }
  static __device__ __forceinline__ void rest(const Parts& parts, int run, float inverse, const uint32_t (&h)[8],
                                              uint32_t (&low)[8]) {
    const int g = run / Format::group;
    auto left = [&](int i) {  // of element i
      return value(level<Format>(parts, run, i), parts.scale[g], parts.offset[g]) * inverse -
             half_bits(h[i / 2] >> 16 * (i % 2));
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) low[i] = pack_halves(left(2 * i), left(2 * i + 1));
  }
};

// F16 and BF16: 16 elements a piece.
template <class Format>
struct Operand<Format, true> {
  static_assert(Format::bytes == 2, "float32 weights stay float32");
  struct Raw {
    Words<4, 16> w[2];
  };
  using Parts = Raw;
  static constexpr int runs = 1, group = 1, block_pieces = 1, block_bytes = 32, block_elements = 16;
  static constexpr bool is_lossless = true, is_scaled = is_same<Format, BF16>::value;

  template <class Bytes>
  static __device__ __forceinline__ Raw fetch(Bytes block, int, int left, bool aligned) {
    Raw raw;
    load_floats<Format>(block, left, aligned, raw.w[0]);
    load_floats<Format>(block + 16, left - 8, aligned, raw.w[1]);
    return raw;
  }
  static __device__ __forceinline__ constexpr int position(int, int) { return 0; }
  static __device__ __forceinline__ void unpack(const Raw& raw, int, Parts& parts) { parts = raw; }
  static __device__ __forceinline__ uint32_t bound(const Parts& parts, int) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t w = parts.w[i / 4][i % 4];
      most = max(most, max(w & 0x7fffu, w >> 16 & 0x7fffu));
    }
    return most << 16;
  }
  template <bool crossed = false>
  static __device__ __forceinline__ void to_half(const Parts& parts, int, float inverse, uint32_t (&h)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto& four = parts.w[i / 4];
      const uint32_t w =
          crossed ? permute(four[i % 4 / 2 * 2], four[i % 4 / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410) : four[i % 4];
      h[i] =
          is_scaled ? pack_halves(__uint_as_float(w << 16) * inverse, __uint_as_float(w & 0xffff0000u) * inverse) : w;
    }
  }
};

}  // namespace reflex
