// Weights of k-quants as whole numbers in half precision: level * scale of the sub-block, both small integers, so that
// a tensor core sums a superblock of 256 before anything is rounded, and what is left are two factors a row:
//   value = factor * (level * scale) - least * minimum
// The products with minima are sums of x over sub-blocks times small integers again, which is one step more.
//
//   has_minima
//   Whole(raw, piece)   of what Operand<Format>::fetch gave a lane for one row
//   unit(i)             which 8 columns `numbers` i are of, from the first of the piece on
//   numbers(i, h)       eight of them, i < 8: elements 0 2, 1 3, 4 6, 5 7, as few.cuh wants them
//   factor, least, minima (those of sub-blocks 2 piece and 2 piece + 1)
#pragma once

#include "operand.cuh"

namespace reflex {

template <class Format>
struct Whole {
  static constexpr bool exists = false, has_minima = false;
};

// A byte b under 0x64 is the half 1024 + b, and (word & mask) | 0x6400 is 1024 more than what the mask leaves.
constexpr uint32_t two_halves(uint32_t bits) { return bits * 0x10001u; }

__device__ __forceinline__ uint32_t masked_or(uint32_t bits, uint32_t mask, uint32_t others) {
#ifdef __CUDA_ARCH__
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(bits), "r"(mask), "r"(others));
  return out;
#else
  return (bits & mask) | others;
#endif
}

template <class Format>
struct WholeOfNibbles {
  static constexpr bool exists = true, has_minima = true;
  typename Format::Raw raw;
  float factor, least;
  uint32_t minima;
  uint32_t scale[2], bias[2];  // of the sub-block of low nibbles, of that of high ones, which come times 16

  static constexpr int unit(int i) { return i; }

  __device__ __forceinline__ WholeOfNibbles(const typename Format::Raw& read, int piece) : raw(read) {
    factor = half_bits(raw.header[0]);
    least = half_bits(raw.header[0] >> 16);
    const uint32_t numbers = k_numbers(raw.header, piece);
    scale[0] = subtract_halves(permute(numbers, 0x64646464, 0x4040), two_halves(0x6400));
    scale[1] = fma_halves(permute(numbers, 0x64646464, 0x4141), two_halves(0x2c00), two_halves(0xd400));  // / 16
    bias[0] = multiply_halves(scale[0], two_halves(0xe400));  // * -1024, exact as 63 * 1024 is
    bias[1] = multiply_halves(scale[1], two_halves(0xe400));
    minima = subtract_halves(permute(numbers, 0x64646464, 0x4342), two_halves(0x6400));
  }

  __device__ __forceinline__ void numbers(int i, uint32_t (&h)[4]) const {
    const int column = i / 2 % 2, high = i / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // bytes 0 and 2 of a word, then 1 and 3
      const int word = 2 * (i % 2) + j / 2;
      h[j] = fma_halves(biased(column, word, j % 2, high), scale[high], bias[high]);
    }
  }

 private:
  __device__ __forceinline__ uint32_t biased(int column, int word, int odd, int high) const {
    const uint32_t q = raw.qs[column][word] >> 8 * odd;
    uint32_t bits = masked_or(q, high ? 0x00f000f0 : 0x000f000f, 0x64006400);
    if constexpr (is_same<Format, Q5_K>::value) {
      // The fifth bit of the low nibbles' levels is bit 0 of a byte of raw.high, that of the high ones' bit 1.
      const uint32_t fifth = raw.high[column][word];
      if (high) {
        bits = masked_or(odd ? fifth >> 1 : fifth << 7, 0x01000100, bits);
      } else {
        bits = masked_or(odd ? fifth >> 4 : fifth << 4, 0x00100010, bits);
      }
    }
    return bits;
  }
};

template <>
struct Whole<Q4_K> : WholeOfNibbles<Q4_K> {
  using WholeOfNibbles::WholeOfNibbles;
};

template <>
struct Whole<Q5_K> : WholeOfNibbles<Q5_K> {
  __device__ __forceinline__ Whole(const Q5_K::Raw& read, int piece) : WholeOfNibbles(read, piece) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw.high[c].w[i] >>= 2 * piece;
    }
  }
};

template <>
struct Whole<Q6_K> {
  static constexpr bool exists = true, has_minima = false;
  Runs<4, 1> runs;
  float factor;
  uint32_t scale[4];

  static constexpr int unit(int i) { return 4 * (i / 2) + i % 2; }

  __device__ __forceinline__ Whole(const Q6_K::Raw& raw, int piece) {
    Q6_K::decode(raw, piece, runs);
    factor = half_bits(raw.d);
    const uint32_t scales = Q6_K::scales(raw, piece) ^ 0x80808080;
#pragma unroll
    for (int r = 0; r < 4; ++r)
      scale[r] = subtract_halves(permute(scales, 0x64646464, 0x4040 + 0x0101 * r), two_halves(0x6480));
  }

  __device__ __forceinline__ void numbers(int i, uint32_t (&h)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t q = permute(runs.q[i / 2][2 * (i % 2) + j / 2], 0x64646464, j % 2 ? 0x4341 : 0x4240);
      h[j] = multiply_halves(subtract_halves(q, two_halves(0x6420)), scale[i / 2]);
    }
  }
};

}  // namespace reflex
