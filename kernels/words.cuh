// Bits, words and how blocks of weights are read: what block formats (dequant.cuh) are written with.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define REFLEX_BOTH __host__ __device__ __forceinline__
#else
#define REFLEX_BOTH inline
#endif

namespace reflex {

// Bytes of {a, b} chosen by the nibbles of `selector` (0..7; what bit 3 would do is not used here).
REFLEX_BOTH uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  uint64_t both = (uint64_t)b << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= (uint32_t)(uint8_t)(both >> 8 * (selector >> 4 * i & 7)) << 8 * i;
  return out;
#endif
}

REFLEX_BOTH float as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float out;
  memcpy(&out, &bits, 4);
  return out;
#endif
}

// Half precision, in the low 16 bits.
REFLEX_BOTH float half_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((unsigned short)bits));
  return out;
#else
  uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return as_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float tiny = (float)mantissa / 16777216.0f;
  return sign ? -tiny : tiny;
#endif
}

REFLEX_BOTH int bits_set(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

// Blocks are read from global memory (or, on the host, from anywhere) through plain pointers, from shared memory
// through these.
struct SharedBytes {
  uint32_t address;
};
REFLEX_BOTH SharedBytes operator+(SharedBytes p, int offset) { return {p.address + (uint32_t)offset}; }

#ifdef __CUDA_ARCH__
__device__ __forceinline__ uint32_t word_at(const uint8_t* p) { return __ldg(reinterpret_cast<const uint32_t*>(p)); }
__device__ __forceinline__ uint2 words2_at(const uint8_t* p) { return __ldg(reinterpret_cast<const uint2*>(p)); }
__device__ __forceinline__ uint4 words4_at(const uint8_t* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ uint32_t load8(const uint8_t* p) { return __ldg(p); }
__device__ __forceinline__ uint32_t load16(const uint8_t* p) {
  return __ldg(reinterpret_cast<const unsigned short*>(p));
}
__device__ __forceinline__ const uint8_t* whole(const uint8_t* p) {
  return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(p) & ~(uintptr_t)3);
}
__device__ __forceinline__ uint32_t low_bits(const uint8_t* p) { return (uint32_t) reinterpret_cast<uintptr_t>(p); }

__device__ __forceinline__ uint32_t word_at(SharedBytes p) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p.address));
  return v;
}
__device__ __forceinline__ uint2 words2_at(SharedBytes p) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p.address));
  return v;
}
__device__ __forceinline__ uint4 words4_at(SharedBytes p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p.address));
  return v;
}
__device__ __forceinline__ uint32_t load8(SharedBytes p) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(p.address));
  return v;
}
__device__ __forceinline__ uint32_t load16(SharedBytes p) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(p.address));
  return v;
}
__device__ __forceinline__ SharedBytes whole(SharedBytes p) { return {p.address & ~3u}; }
__device__ __forceinline__ uint32_t low_bits(SharedBytes p) { return p.address; }
#else
inline uint32_t load8(const uint8_t* p) { return *p; }
inline uint32_t load16(const uint8_t* p) { return p[0] | (uint32_t)p[1] << 8; }
#endif

// N words read from an address that is a multiple of `alignment`. Where that is no multiple of 4, the whole words
// around them are read, and shifted into place only when they are used: until then the loads may be in flight.
template <int N, int alignment>
struct Words {
  static constexpr bool shifts = alignment < 4;
  uint32_t w[N + 2 * shifts];  // the last one is by how many bits to shift

  template <class Bytes>
  REFLEX_BOTH void load(Bytes p) {
#ifdef __CUDA_ARCH__
    if constexpr (alignment >= 16 && N == 4) {
      const uint4 v = words4_at(p);
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else if constexpr (alignment >= 8 && N % 2 == 0) {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const uint2 v = words2_at(p + 4 * i);
        w[i] = v.x, w[i + 1] = v.y;
      }
    } else if constexpr (!shifts) {
#pragma unroll
      for (int i = 0; i < N; ++i) w[i] = word_at(p + 4 * i);
    } else {
      const Bytes first = whole(p);
#pragma unroll
      for (int i = 0; i < N; ++i) w[i] = word_at(first + 4 * i);
      w[N] = word_at(whole(p + (4 * N - 1)));
      w[N + 1] = 8 * (low_bits(p) & 3);
    }
#else
    memset(w, 0, sizeof w);
    memcpy(w, p, 4 * N);
#endif
  }

  // The same from `offset`, a multiple of 4, into a block, where one word more still touches the block.
  template <class Bytes>
  REFLEX_BOTH void load_inside(Bytes block, int offset) {
#ifdef __CUDA_ARCH__
    static_assert(shifts, "for blocks at odd places");
    const Bytes first = whole(block) + offset;
#pragma unroll
    for (int i = 0; i <= N; ++i) w[i] = word_at(first + 4 * i);
    w[N + 1] = 8 * (low_bits(block) & 3);
#else
    load(block + offset);
#endif
  }

  REFLEX_BOTH uint32_t operator[](int i) const {
#ifdef __CUDA_ARCH__
    if constexpr (shifts) return __funnelshift_r(w[i], w[i + 1], w[N + 1]);
#endif
    return w[i];
  }
};

REFLEX_BOTH uint32_t byte_of(uint32_t word, int i) { return word >> 8 * i & 255; }

// f times byte i of a word, rounded once: under 0x4b a byte b is the float 2^23 + b.
REFLEX_BOTH float times_byte(float f, uint32_t word, int i) {
#ifdef __CUDA_ARCH__
  return fmaf(f, as_float(permute(word, 0x4b000000, 0x7650 + i)), f * -8388608.0f);
#else
  return f * (float)byte_of(word, i);
#endif
}

// Four bits, one a byte.
REFLEX_BOTH uint32_t spread_bits(uint32_t b) { return (b & 15) * 0x00204081u & 0x01010101u; }

// Four 2-bit numbers of a byte, one a byte.
REFLEX_BOTH uint32_t spread_pairs(uint32_t b) {
  b &= 255;
  return (b | b << 6 | b << 12 | b << 18) & 0x03030303u;
}

// The runs of a piece: levels in element order, scales and offsets a group.
template <int runs, int group>
struct Runs {
  uint32_t q[runs][4];
  float scale[runs / group], offset[runs / group];
};

}  // namespace reflex
