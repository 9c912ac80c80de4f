// Weights of k-quants as whole numbers in half precision: level * scale of the sub-block, both small integers, so that
// a tensor core sums a superblock of 256 before anything is rounded, and what is left are two factors a row:
//   value = factor * (level * scale) - least * minimum
// The products with minima are sums of x over sub-blocks times small integers again, which is one step more.
//
// Lane t of a row has columns 128 (t / 2) + 16 (t % 2) + 32 r + 0 .. 15 of a superblock, r < 4: runs of 16 under one
// scale each, whatever the type.
//
//   has_minima
//   Whole(block, t)     reads a superblock in shared memory
//   numbers(r, w, h)    elements 4 w .. 4 w + 3 of run r: 0 2, then 1 3
//   factor, least, minima (those of sub-blocks 2 t and 2 t + 1)
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

// Q4_K and Q5_K. Runs 0 and 2 are low nibbles, 1 and 3 high ones.
template <class Format>
struct WholeOfNibbles {
  static constexpr bool exists = true, has_minima = true, has_fifth = is_same<Format, Q5_K>::value;
  Words<4, 16> qs[2], fifth;
  float factor, least;
  uint32_t minima;
  uint32_t scale[4], bias[4];

  __device__ __forceinline__ WholeOfNibbles(SharedBytes block, int t) {
    Words<4, 16> header;
    header.load(block);
    const SharedBytes levels = block + (has_fifth ? 48 : 16) + 64 * (t / 2) + 16 * (t % 2);
    qs[0].load(levels);
    qs[1].load(levels + 32);
    if constexpr (has_fifth) {
      fifth.load(block + 16 + 16 * (t % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) fifth.w[i] >>= 4 * (t / 2);  // bit r of a byte is that of run r
    }
    factor = half_bits(header[0]);
    least = half_bits(header[0] >> 16);
    const uint32_t both[2] = {k_numbers(header, t & 2), k_numbers(header, t | 1)};
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      const uint32_t numbers = both[r / 2];
      scale[r] = subtract_halves(permute(numbers, 0x64646464, 0x4040), two_halves(0x6400));
      // High nibbles come times 16.
      scale[r + 1] = fma_halves(permute(numbers, 0x64646464, 0x4141), two_halves(0x2c00), two_halves(0xd400));
      bias[r] = multiply_halves(scale[r], two_halves(0xe400));  // * -1024, exact as 63 * 1024 is
      bias[r + 1] = multiply_halves(scale[r + 1], two_halves(0xe400));
    }
    minima = subtract_halves(permute(t & 1 ? both[1] : both[0], 0x64646464, 0x4342), two_halves(0x6400));
  }

  __device__ __forceinline__ void numbers(int r, int word, uint32_t (&h)[2]) const {
    const uint32_t q = qs[r / 2][word], mask = r % 2 ? 0x00f000f0 : 0x000f000f;
    h[0] = masked_or(q, mask, 0x64006400);
    h[1] = masked_or(q >> 8, mask, 0x64006400);
    if constexpr (has_fifth) {
      const uint32_t high = fifth[word], bit = r % 2 ? 0x01000100 : 0x00100010;
      const int place = r % 2 ? 8 : 4;
      h[0] = masked_or(high << (place - r), bit, h[0]);
      h[1] = masked_or(high >> (8 + r - place), bit, h[1]);
    }
    h[0] = fma_halves(h[0], scale[r], bias[r]);
    h[1] = fma_halves(h[1], scale[r], bias[r]);
  }
};

template <>
struct Whole<Q4_K> : WholeOfNibbles<Q4_K> {
  using WholeOfNibbles::WholeOfNibbles;
};

template <>
struct Whole<Q5_K> : WholeOfNibbles<Q5_K> {
  using WholeOfNibbles::WholeOfNibbles;
};

template <>
struct Whole<Q6_K> {
  static constexpr bool exists = true, has_minima = false;
  Runs<4, 1> runs;
  float factor;
  uint32_t scale[4];

  __device__ __forceinline__ Whole(SharedBytes block, int t) {
    const Q6_K::Raw raw = Q6_K::fetch(block, t);
    Q6_K::decode(raw, t, runs);
    factor = half_bits(raw.d);
    const uint32_t scales = Q6_K::scales(raw, t) ^ 0x80808080;
#pragma unroll
    for (int r = 0; r < 4; ++r)
      scale[r] = subtract_halves(permute(scales, 0x64646464, 0x4040 + 0x0101 * r), two_halves(0x6480));
  }

  __device__ __forceinline__ void numbers(int r, int word, uint32_t (&h)[2]) const {
    const uint32_t q = runs.q[r][word];
    h[0] = multiply_halves(subtract_halves(permute(q, 0x64646464, 0x4240), two_halves(0x6420)), scale[r]);
    h[1] = multiply_halves(subtract_halves(permute(q, 0x64646464, 0x4341), two_halves(0x6420)), scale[r]);
  }
};

}  // namespace reflex
