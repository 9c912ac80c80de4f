// GGUF block formats: bytes -> levels, scales, offsets. Plain C++ that compiles for the device and for the host.
//
// Every quantised type is   value = scale * (level - zero) + offset   with small integer levels; 16 consecutive elements
// always share scale and offset: a *run*. What one thread reads at a time is a *piece* of a block: 16 bytes or so that
// hold `runs` runs, which need not be neighbours (low and high nibbles of a byte are 16 or 32 elements apart).
//
//   elements, bytes      of a block
//   runs                 of a piece
//   group                runs that share scale and offset: 1, or 2 for the halves of an aligned 32
//   zero, greatest       level that means 0, greatest |level - zero|
//   has_offset           some offset is not 0
//   is_signed            levels are signed bytes (and zero is 0)
//   shift(run)           the bytes of a run are its levels times 2^shift: some bits are taken where they are
//   fetch(block, piece)  -> Raw: the memory reads, nothing else, so that they can be issued early
//   decode(raw, piece, runs)    arithmetic only; a Raw of zeros decodes to the value 0
//   position(piece, run) first element of that run within the block
//
// A block begins where the previous one ends: its address is a multiple of `alignment` only. Reads never leave the
// aligned 4-byte words that the block touches.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define REFLEX_BOTH __host__ __device__ __forceinline__
#else
#define REFLEX_BOTH inline
#endif

#include "codebooks.cuh"

namespace reflex {

// --- words ------------------------------------------------------------------------------------------------------------

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

// Blocks are read from global memory (or, on the host, from anywhere) through plain pointers, from shared memory through
// these.
struct SharedBytes {
  uint32_t address;
};
REFLEX_BOTH SharedBytes operator+(SharedBytes p, int offset) { return {p.address + (uint32_t)offset}; }

#ifdef __CUDA_ARCH__
__device__ __forceinline__ uint32_t word_at(const uint8_t* p) { return __ldg(reinterpret_cast<const uint32_t*>(p)); }
__device__ __forceinline__ uint2 words2_at(const uint8_t* p) { return __ldg(reinterpret_cast<const uint2*>(p)); }
__device__ __forceinline__ uint4 words4_at(const uint8_t* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ uint32_t load8(const uint8_t* p) { return __ldg(p); }
__device__ __forceinline__ uint32_t load16(const uint8_t* p) { return __ldg(reinterpret_cast<const unsigned short*>(p)); }
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

// N words read from an address that is a multiple of `alignment`. Where that is no multiple of 4, the whole words around
// them are read, and shifted into place only when they are used: until then the loads may be in flight.
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

// --- 32 elements, one scale -------------------------------------------------------------------------------------------

// Nibbles of 16 bytes, four words from `first`: the low ones are elements 0..15, the high ones, left where they are, 16..31.
template <class Words>
REFLEX_BOTH void split_nibbles(const Words& words, int first, uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    low[i] = words[first + i] & 0x0f0f0f0f;
    high[i] = words[first + i] & 0xf0f0f0f0;
  }
}

struct Q4_0 {  // d f16, qs[16]
  static constexpr int elements = 32, bytes = 18, alignment = 2, runs = 2, group = 2, zero = 8, greatest = 8;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<4, 2> qs;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int, int run) { return 16 * run; }
  static REFLEX_BOTH constexpr int shift(int run) { return 4 * run; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int) {
    Raw raw;
    raw.d = load16(block);
    raw.qs.load(block + 2);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    split_nibbles(raw.qs, 0, out.q[0], out.q[1]);
    out.scale[0] = half_bits(raw.d);
    out.offset[0] = 0;
  }
};

struct Q4_1 {  // d, m f16, qs[16]
  static constexpr int elements = 32, bytes = 20, alignment = 4, runs = 2, group = 2, zero = 0, greatest = 15;
  static constexpr bool has_offset = true, is_signed = false;
  struct Raw {
    Words<5, 4> w;
  };
  static REFLEX_BOTH constexpr int position(int, int run) { return 16 * run; }
  static REFLEX_BOTH constexpr int shift(int run) { return 4 * run; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int) {
    Raw raw;
    raw.w.load(block);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    split_nibbles(raw.w, 1, out.q[0], out.q[1]);
    out.scale[0] = half_bits(raw.w[0]);
    out.offset[0] = half_bits(raw.w[0] >> 16);
  }
};

// Nibbles as above, and bit j of `qh` as bit 4 of element j.
template <class Words>
REFLEX_BOTH void five_bits(const Words& words, int first, uint32_t qh, uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    low[i] = (words[first + i] & 0x0f0f0f0f) | spread_bits(qh >> 4 * i) << 4;
    high[i] = (words[first + i] >> 4 & 0x0f0f0f0f) | spread_bits(qh >> (16 + 4 * i)) << 4;
  }
}

struct Q5_0 {  // d f16, qh u32, qs[16]
  static constexpr int elements = 32, bytes = 22, alignment = 2, runs = 2, group = 2, zero = 16, greatest = 16;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<5, 2> w;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int, int run) { return 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int) {
    Raw raw;
    raw.d = load16(block);
    raw.w.load(block + 2);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    five_bits(raw.w, 1, raw.w[0], out.q[0], out.q[1]);
    out.scale[0] = half_bits(raw.d);
    out.offset[0] = 0;
  }
};

struct Q5_1 {  // d, m f16, qh u32, qs[16]
  static constexpr int elements = 32, bytes = 24, alignment = 8, runs = 2, group = 2, zero = 0, greatest = 31;
  static constexpr bool has_offset = true, is_signed = false;
  struct Raw {
    Words<6, 8> w;
  };
  static REFLEX_BOTH constexpr int position(int, int run) { return 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int) {
    Raw raw;
    raw.w.load(block);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    five_bits(raw.w, 2, raw.w[1], out.q[0], out.q[1]);
    out.scale[0] = half_bits(raw.w[0]);
    out.offset[0] = half_bits(raw.w[0] >> 16);
  }
};

struct Q8_0 {  // d f16, i8[32]
  static constexpr int elements = 32, bytes = 34, alignment = 2, runs = 2, group = 2, zero = 0, greatest = 128;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<8, 2> qs;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int, int run) { return 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int) {
    Raw raw;
    raw.d = load16(block);
    raw.qs.load(block + 2);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out.q[i >> 2][i & 3] = raw.qs[i];
    out.scale[0] = half_bits(raw.d);
    out.offset[0] = 0;
  }
};

// --- k-quants: 256 elements, small integer scales under one or two half-precision ones ---------------------------------

struct Q2_K {  // scales[16], qs[64], d, dmin f16
  static constexpr int elements = 256, bytes = 84, alignment = 4, runs = 4, group = 1, zero = 0, greatest = 3;
  static constexpr bool has_offset = true, is_signed = false;
  struct Raw {
    Words<4, 4> qs;
    Words<2, 4> scales;
    Words<1, 4> d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1); }
  static REFLEX_BOTH constexpr int shift(int run) { return 2 * run; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.qs.load(block + 16 + 16 * piece);
    raw.scales.load(block + 8 * (piece >> 1));
    raw.d.load(block + 80);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<4, 1>& out) {
    const float d = half_bits(raw.d[0]), dmin = half_bits(raw.d[0] >> 16);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t s = raw.scales[r >> 1] >> (16 * (r & 1) + 8 * (piece & 1));
#pragma unroll
      for (int i = 0; i < 4; ++i) out.q[r][i] = raw.qs[i] & 0x03030303u << 2 * r;
      out.scale[r] = d * (float)(s & 15);
      out.offset[r] = -dmin * (float)(s >> 4 & 15);
    }
  }
};

struct Q3_K {  // hmask[32], qs[64], scales[12], d f16
  static constexpr int elements = 256, bytes = 110, alignment = 2, runs = 4, group = 1, zero = 4, greatest = 4;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<4, 2> qs;
    Words<4, 2> high;
    Words<3, 2> scales;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1); }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.qs.load_inside(block, 16 * piece + 32);
    raw.high.load_inside(block, 16 * (piece & 1));
    raw.scales.load_inside(block, 96);
    raw.d = load16(block + 108);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<4, 1>& out) {
    const float d = half_bits(raw.d);
    const int half = piece >> 1, column = piece & 1;
    // Scales 0..7 are the low nibbles of 8 bytes, 8..15 the high ones; scale k has 2 more bits in byte 8 + k % 4.
    const uint32_t low[2] = {raw.scales[0] >> 4 * half & 0x0f0f0f0f, raw.scales[1] >> 4 * half & 0x0f0f0f0f};
    uint32_t qs[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) qs[i] = raw.qs[i], high[i] = raw.high[i] >> 4 * half;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int k = 2 * r + column;  // and 8 * half
      const uint32_t l = low[r >> 1] >> (16 * (r & 1) + 8 * column) & 15;
      const uint32_t h = raw.scales[2] >> (8 * (k & 3) + 4 * half + 2 * (k >> 2)) & 3;
#pragma unroll
      for (int i = 0; i < 4; ++i) out.q[r][i] = (qs[i] >> 2 * r & 0x03030303) | (high[i] >> r & 0x01010101) << 2;
      out.scale[r] = d * (float)((int)(l | h << 4) - 32);
      out.offset[r] = 0;
    }
  }
};

// Q4_K and Q5_K: 6-bit scales and minima of sub-blocks 2 * pair and 2 * pair + 1. w[0] is d and dmin; w[1] has scales
// 0..3 and, in its top bits, two bits of scales 4..7; w[2] the same of minima; w[3] the other four bits of both.
REFLEX_BOTH void k_scales(const Words<4, 16>& w, int pair, float (&scale)[2], float (&offset)[2]) {
  const float d = half_bits(w[0]), dmin = half_bits(w[0] >> 16);
  const uint32_t half = pair & 1 ? 0x7632 : 0x5410;  // two bytes of one word, two of another
  const uint32_t six = permute(w[1], w[2], half), four = permute(w[3], w[3] >> 4, half);
  const uint32_t both = (pair & 2 ? (four & 0x0f0f0f0f) | (six >> 2 & 0xf0f0f0f0) : six) & 0x3f3f3f3f;
  scale[0] = times_byte(d, both, 0);
  scale[1] = times_byte(d, both, 1);
  offset[0] = times_byte(-dmin, both, 2);
  offset[1] = times_byte(-dmin, both, 3);
}

struct Q4_K {  // d, dmin f16, scales[12], qs[128]
  static constexpr int elements = 256, bytes = 144, alignment = 16, runs = 4, group = 2, zero = 0, greatest = 15;
  static constexpr bool has_offset = true, is_signed = false;
  struct Raw {
    Words<4, 16> qs[2];
    Words<4, 16> header;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 64 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int run) { return run < 2 ? 0 : 4; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    const Bytes qs = block + 32 * piece;
    raw.qs[0].load(qs + 16);
    raw.qs[1].load(qs + 32);
    raw.header.load(block);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<4, 2>& out) {
    split_nibbles(raw.qs[0], 0, out.q[0], out.q[2]);
    split_nibbles(raw.qs[1], 0, out.q[1], out.q[3]);
    k_scales(raw.header, piece, out.scale, out.offset);
  }
};

struct Q5_K {  // d, dmin f16, scales[12], qh[32], qs[128]
  static constexpr int elements = 256, bytes = 176, alignment = 16, runs = 4, group = 2, zero = 0, greatest = 31;
  static constexpr bool has_offset = true, is_signed = false;
  struct Raw {
    Words<4, 16> qs[2], high[2], header;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 64 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    const Bytes qs = block + 32 * piece;
    raw.qs[0].load(qs + 48);
    raw.qs[1].load(qs + 64);
    raw.high[0].load(block + 16);
    raw.high[1].load(block + 32);
    raw.header.load(block);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<4, 2>& out) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t high = raw.high[c][i] >> 2 * piece;
        out.q[c][i] = (raw.qs[c][i] & 0x0f0f0f0f) | (high & 0x01010101) << 4;
        out.q[2 + c][i] = (raw.qs[c][i] >> 4 & 0x0f0f0f0f) | (high & 0x02020202) << 3;
      }
    }
    k_scales(raw.header, piece, out.scale, out.offset);
  }
};

struct Q6_K {  // ql[128], qh[64], i8 scales[16], d f16
  static constexpr int elements = 256, bytes = 210, alignment = 2, runs = 4, group = 1, zero = 32, greatest = 32;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<4, 2> ql[2], qh;  // two columns of ql share one of qh
    Words<2, 2> scales;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1); }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    const int half = piece >> 1, column = piece & 1;
    raw.ql[0].load_inside(block, 64 * half + 16 * column);
    raw.ql[1].load_inside(block, 64 * half + 16 * column + 32);
    raw.qh.load_inside(block, 32 * half + 16 * column + 128);
    raw.scales.load_inside(block, 8 * half + 192);
    raw.d = load16(block + 208);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<4, 1>& out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = raw.ql[0][i], next = raw.ql[1][i], high = raw.qh[i];
      out.q[0][i] = (low & 0x0f0f0f0f) | (high << 4 & 0x30303030);
      out.q[1][i] = (next & 0x0f0f0f0f) | (high << 2 & 0x30303030);
      out.q[2][i] = (low >> 4 & 0x0f0f0f0f) | (high & 0x30303030);
      out.q[3][i] = (next >> 4 & 0x0f0f0f0f) | (high >> 2 & 0x30303030);
    }
    const float d = half_bits(raw.d);
    const uint32_t scales = permute(raw.scales[0], raw.scales[1], piece & 1 ? 0x7531 : 0x6420);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      out.scale[r] = d * (float)(int8_t)byte_of(scales, r);
      out.offset[r] = 0;
    }
  }
};

// --- 4-bit values from a list -----------------------------------------------------------------------------------------

// The values of eight nibbles from a table of 16 bytes, in the order of the nibbles.
REFLEX_BOTH void look_up(const uint32_t (&table)[4], uint32_t nibbles, uint32_t& first, uint32_t& second) {
  const uint32_t index = nibbles & 0x77777777, upper = nibbles >> 1 & 0x44444444;
  first = permute(permute(table[0], table[1], index), permute(table[2], table[3], index), (upper & 0xffff) | 0x3210);
  second = permute(permute(table[0], table[1], index >> 16), permute(table[2], table[3], index >> 16), upper >> 16 | 0x3210);
}

// As split_nibbles, through a table.
template <class Words>
REFLEX_BOTH void look_up_nibbles(const uint32_t (&table)[4], const Words& qs, Runs<2, 2>& out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t first, second;
    look_up(table, qs[i], first, second);
    out.q[0][i] = permute(first, second, 0x6420);
    out.q[1][i] = permute(first, second, 0x7531);
  }
}

struct IQ4_NL {  // d f16, qs[16]
  static constexpr int elements = 32, bytes = 18, alignment = 2, runs = 2, group = 2, zero = 0, greatest = 127;
  static constexpr bool has_offset = false, is_signed = true;
  using Raw = Q4_0::Raw;
  static REFLEX_BOTH constexpr int position(int, int run) { return 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) { return Q4_0::fetch(block, piece); }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    const uint32_t table[4] = IQ4_TABLE;
    look_up_nibbles(table, raw.qs, out);
    out.scale[0] = half_bits(raw.d);
    out.offset[0] = 0;
  }
};

struct IQ4_XS {  // d f16, scales_h u16, scales_l[4], qs[128]
  static constexpr int elements = 256, bytes = 136, alignment = 8, runs = 2, group = 2, zero = 0, greatest = 127;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<4, 8> qs;
    Words<2, 8> header;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.qs.load(block + 8 + 16 * piece);
    raw.header.load(block);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<2, 2>& out) {
    const uint32_t table[4] = IQ4_TABLE;
    look_up_nibbles(table, raw.qs, out);
    const uint32_t scale = (raw.header[1] >> 4 * piece & 15) | (raw.header[0] >> (16 + 2 * piece) & 3) << 4;
    out.scale[0] = half_bits(raw.header[0]) * (float)((int)scale - 32);
    out.offset[0] = 0;
  }
};

struct MXFP4 {  // e u8, qs[16]
  static constexpr int elements = 32, bytes = 17, alignment = 1, runs = 2, group = 2, zero = 0, greatest = 12;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<4, 1> qs;
    uint32_t e;
  };
  static REFLEX_BOTH constexpr int position(int, int run) { return 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int) {
    Raw raw;
    raw.e = load8(block);
    raw.qs.load(block + 1);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    const uint32_t table[4] = FP4_TABLE;
    look_up_nibbles(table, raw.qs, out);
    // 2^(e - 128): half of E8M0's value, since the table holds doubled ones; subnormal below e = 2.
    out.scale[0] = as_float(raw.e >= 2 ? (raw.e - 1) << 23 : 0x00200000u << raw.e);
    out.offset[0] = 0;
  }
};

struct NVFP4 {  // ue4m3 d[4], qs[32]: 4 sub-blocks of 16, the high nibbles of 8 bytes follow the low ones
  static constexpr int elements = 64, bytes = 36, alignment = 4, runs = 2, group = 1, zero = 0, greatest = 12;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<4, 4> qs;
    Words<1, 4> d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.qs.load(block + 4 + 16 * piece);
    raw.d.load(block);
    return raw;
  }
  static REFLEX_BOTH float half_ue4m3(uint32_t x) {  // exponent bias 7, no sign; halved as the table is doubled
    const uint32_t exponent = x >> 3 & 15, mantissa = x & 7;
    if (x == 0x7f) return 0;
    return exponent ? as_float((exponent + 119) << 23 | mantissa << 20) : (float)mantissa * (1.0f / 1024);
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<2, 1>& out) {
    const uint32_t table[4] = FP4_TABLE;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t first, second;
        look_up(table, raw.qs[2 * r + i], first, second);
        out.q[r][i] = permute(first, second, 0x6420);
        out.q[r][i + 2] = permute(first, second, 0x7531);
      }
      out.scale[r] = half_ue4m3(byte_of(raw.d[0], 2 * piece + r));
      out.offset[r] = 0;
    }
  }
};

// --- one to two bits --------------------------------------------------------------------------------------------------

struct Q1_0 {  // d f16, bits[16]: -d or d
  static constexpr int elements = 128, bytes = 18, alignment = 2, runs = 2, group = 2, zero = 1, greatest = 1;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<1, 2> bits;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.bits.load(block + 2 + 4 * piece);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out.q[i >> 2][i & 3] = spread_bits(raw.bits[0] >> 4 * i) << 1;
    out.scale[0] = half_bits(raw.d);
    out.offset[0] = 0;
  }
};

struct Q2_0 {  // d f16, qs[16]: d * (q - 1)
  static constexpr int elements = 64, bytes = 18, alignment = 2, runs = 2, group = 2, zero = 1, greatest = 2;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<2, 2> qs;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.qs.load(block + 2 + 8 * piece);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out.q[i >> 2][i & 3] = spread_pairs(byte_of(raw.qs[i >> 2], i & 3));
    out.scale[0] = half_bits(raw.d);
    out.offset[0] = 0;
  }
};

struct TQ2_0 {  // qs[64], d f16: d * (q - 1)
  static constexpr int elements = 256, bytes = 66, alignment = 2, runs = 4, group = 1, zero = 1, greatest = 2;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<4, 2> qs;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1); }
  static REFLEX_BOTH constexpr int shift(int run) { return 2 * run; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.qs.load(block + 16 * piece);
    raw.d = load16(block + 64);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<4, 1>& out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t qs = raw.qs[i];
#pragma unroll
      for (int r = 0; r < 4; ++r) out.q[r][i] = qs & 0x03030303u << 2 * r;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      out.scale[r] = half_bits(raw.d);
      out.offset[r] = 0;
    }
  }
};

struct TQ1_0 {  // qs[48], qh[4], d f16: base-3 digits, d * (digit - 1)
  // A byte is a fraction of 256 whose base-3 digits these are: times 3^i modulo 256, then the digit is 3 * it div 256.
  // Digit i of bytes 0..31 are elements 32 i + .., of bytes 32..47 elements 160 + 16 i + .., of qh 240 + 4 i + ...
  static constexpr int elements = 256, bytes = 54, alignment = 2, runs = 1, group = 1, zero = 1, greatest = 1;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<4, 2> qs;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int) { return 16 * piece; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.qs.load(block + (piece < 10 ? 16 * (piece & 1) : piece < 15 ? 32 : 36));  // the last ends with qh
    raw.d = load16(block + 52);
    return raw;
  }
  static REFLEX_BOTH uint32_t power_of_3(int i) { return i == 0 ? 1 : i == 1 ? 3 : i == 2 ? 9 : i == 3 ? 27 : 81; }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<1, 1>& out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t factor = power_of_3(piece < 10 ? piece >> 1 : piece < 15 ? piece - 10 : i);
      const uint32_t qs = piece < 15 ? raw.qs[i] : raw.qs[3];
      // Two bytes at a time in 16-bit lanes.
      const uint32_t even = ((qs & 0x00ff00ff) * factor & 0x00ff00ff) * 3;
      const uint32_t odd = ((qs >> 8 & 0x00ff00ff) * factor & 0x00ff00ff) * 3;
      out.q[0][i] = (even >> 8 & 0x00ff00ff) | (odd & 0xff00ff00);
    }
    out.scale[0] = half_bits(raw.d);
    out.offset[0] = 0;
  }
};

// --- lattice points: 8 (or 4) elements are one index into a codebook ---------------------------------------------------
// codebooks.cuh holds a point as nibbles, each the place of a coordinate in the list of values it can take.

// Two words of a point of 8 coordinates that take up to 4 values, a byte of `values` each.
REFLEX_BOTH void point8(uint32_t digits, uint32_t values, uint32_t (&q)[4], int at) {
  q[at] = permute(values, 0, digits & 0xffff);
  q[at + 1] = permute(values, 0, digits >> 16);
}

// Signs of four bytes, none of which is 0, by four bits.
REFLEX_BOTH uint32_t negate(uint32_t q, uint32_t bits) {
  const uint32_t ones = spread_bits(bits);
  return (q ^ ones * 255) + ones;
}

// Eight sign bits from seven: the last makes their number even.
REFLEX_BOTH uint32_t even_signs(uint32_t seven) { return seven | (uint32_t)(bits_set(seven) & 1) << 7; }

REFLEX_BOTH void signs8(uint32_t bits, uint32_t (&q)[4], int at) {
  q[at] = negate(q[at], bits);
  q[at + 1] = negate(q[at + 1], bits >> 4);
}

struct IQ2_XXS {  // d f16, then per 32 elements: 4 indices u8, u32 of four 7-bit signs and a 4-bit scale
  static constexpr int elements = 256, bytes = 66, alignment = 2, runs = 2, group = 2, zero = 0, greatest = 43;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<2, 2> w;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.w.load(block + 2 + 8 * piece);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    const uint32_t index = raw.w[0], word = raw.w[1];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      point8(iq2_xxs_point(byte_of(index, k)), IQ2_XXS_VALUES, out.q[k >> 1], 2 * (k & 1));
      signs8(even_signs(word >> 7 * k & 127), out.q[k >> 1], 2 * (k & 1));
    }
    out.scale[0] = half_bits(raw.d) * ((float)(word >> 28) + 0.5f) * 0.25f;
    out.offset[0] = 0;
  }
};

struct IQ2_XS {  // d f16, u16[32] of a 9-bit index and 7 signs, scales[8]
  static constexpr int elements = 256, bytes = 74, alignment = 2, runs = 2, group = 1, zero = 0, greatest = 43;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<2, 2> w;
    uint32_t scale, d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.w.load(block + 2 + 8 * piece);
    raw.scale = load8(block + 66 + piece);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 1>& out) {
    const float d = half_bits(raw.d);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t word = raw.w[r];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t code = word >> 16 * k & 0xffff;
        point8(iq2_xs_point(code & 511), IQ2_XS_VALUES, out.q[r], 2 * k);
        signs8(even_signs(code >> 9), out.q[r], 2 * k);
      }
      out.scale[r] = d * ((float)(raw.scale >> 4 * r & 15) + 0.5f) * 0.25f;
      out.offset[r] = 0;
    }
  }
};

struct IQ2_S {  // d f16, qs[32], signs[32], qh[8], scales[8]
  static constexpr int elements = 256, bytes = 82, alignment = 2, runs = 2, group = 1, zero = 0, greatest = 43;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<1, 2> qs, signs;
    uint32_t qh, scale, d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.qs.load(block + 2 + 4 * piece);
    raw.signs.load(block + 34 + 4 * piece);
    raw.qh = load8(block + 66 + piece);
    raw.scale = load8(block + 74 + piece);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 1>& out) {
    const float d = half_bits(raw.d);
    const uint32_t qs = raw.qs[0], signs = raw.signs[0];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      point8(iq2_s_point(byte_of(qs, k) | (raw.qh >> 2 * k & 3) << 8), IQ2_S_VALUES, out.q[k >> 1], 2 * (k & 1));
      signs8(byte_of(signs, k), out.q[k >> 1], 2 * (k & 1));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      out.scale[r] = d * ((float)(raw.scale >> 4 * r & 15) + 0.5f) * 0.25f;
      out.offset[r] = 0;
    }
  }
};

struct IQ3_XXS {  // d f16, qs[64], u32[8] of four 7-bit signs and a 4-bit scale
  static constexpr int elements = 256, bytes = 98, alignment = 2, runs = 2, group = 2, zero = 0, greatest = 62;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<2, 2> qs;
    Words<1, 2> w;
    uint32_t d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.qs.load(block + 2 + 8 * piece);
    raw.w.load(block + 66 + 4 * piece);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    const uint32_t qs[2] = {raw.qs[0], raw.qs[1]}, word = raw.w[0];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      out.q[k >> 2][k & 3] = permute(IQ3_XXS_VALUES, IQ3_XXS_VALUES_HIGH, iq3_xxs_point(byte_of(qs[k >> 2], k & 3)));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) signs8(even_signs(word >> 7 * k & 127), out.q[k >> 1], 2 * (k & 1));
    out.scale[0] = half_bits(raw.d) * ((float)(word >> 28) + 0.5f) * 0.5f;
    out.offset[0] = 0;
  }
};

struct IQ3_S {  // d f16, qs[64], qh[8], signs[32], scales[4]
  static constexpr int elements = 256, bytes = 110, alignment = 2, runs = 2, group = 2, zero = 0, greatest = 15;
  static constexpr bool has_offset = false, is_signed = true;
  struct Raw {
    Words<2, 2> qs;
    Words<1, 2> signs;
    uint32_t qh, scale, d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.qs.load(block + 2 + 8 * piece);
    raw.qh = load8(block + 66 + piece);
    raw.signs.load(block + 74 + 4 * piece);
    raw.scale = load8(block + 106 + (piece >> 1));
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<2, 2>& out) {
    const uint32_t qs[2] = {raw.qs[0], raw.qs[1]}, signs = raw.signs[0];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t index = byte_of(qs[k >> 2], k & 3) | (raw.qh >> k & 1) << 8;
      out.q[k >> 2][k & 3] = permute(IQ3_S_VALUES, IQ3_S_VALUES_HIGH, iq3_s_point(index));
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) signs8(byte_of(signs, k), out.q[k >> 1], 2 * (k & 1));
    out.scale[0] = half_bits(raw.d) * (float)(2 * (raw.scale >> 4 * (piece & 1) & 15) + 1);
    out.offset[0] = 0;
  }
};

// IQ1: coordinates -1, 0, 1 moved up or down by an eighth; in eighths, and 9 of them up so that none is negative.
REFLEX_BOTH void point_and_shift(uint32_t index, uint32_t down, uint32_t (&q)[4], int at) {
  point8(iq1_s_point(index), 0x00100800, q, at);
  const uint32_t up = down ? 0 : 0x02020202;
  q[at] += up;
  q[at + 1] += up;
}

struct IQ1_S {  // d f16, qs[32], qh u16[8]: four times 3 bits of index, a 3-bit scale, a bit for down
  static constexpr int elements = 256, bytes = 50, alignment = 2, runs = 2, group = 2, zero = 9, greatest = 9;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<1, 2> qs;
    uint32_t qh, d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.d = load16(block);
    raw.qs.load(block + 2 + 4 * piece);
    raw.qh = load16(block + 34 + 2 * piece);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int, Runs<2, 2>& out) {
    const uint32_t qs = raw.qs[0];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t index = byte_of(qs, k) | (raw.qh >> 3 * k & 7) << 8;
      point_and_shift(index, raw.qh >> 15, out.q[k >> 1], 2 * (k & 1));
    }
    out.scale[0] = half_bits(raw.d) * (float)(2 * (raw.qh >> 12 & 7) + 1) * 0.125f;
    out.offset[0] = 0;
  }
};

struct IQ1_M {  // qs[32], qh[16]: nibbles of 3 bits of index and a bit for down; u16[4] of four 3-bit scales, a nibble of d
  static constexpr int elements = 256, bytes = 56, alignment = 8, runs = 2, group = 1, zero = 9, greatest = 9;
  static constexpr bool has_offset = false, is_signed = false;
  struct Raw {
    Words<1, 4> qs;
    Words<2, 8> scales;
    uint32_t qh;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) { return 32 * piece + 16 * run; }
  static REFLEX_BOTH constexpr int shift(int) { return 0; }
  template <class Bytes>
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    Raw raw;
    raw.qs.load(block + 4 * piece);
    raw.qh = load16(block + 32 + 2 * piece);
    raw.scales.load(block + 48);
    return raw;
  }
  static REFLEX_BOTH void decode(const Raw& raw, int piece, Runs<2, 1>& out) {
    const uint32_t s0 = raw.scales[0], s1 = raw.scales[1];
    const float d = half_bits((s0 >> 12 & 15) | (s0 >> 24 & 0xf0) | (s1 >> 4 & 0xf00) | (s1 >> 16 & 0xf000));
    const uint32_t three = (piece & 4 ? s1 : s0) >> (16 * (piece >> 1 & 1) + 6 * (piece & 1));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t nibble = raw.qh >> 4 * k & 15;
      point_and_shift(byte_of(raw.qs[0], k) | (nibble & 7) << 8, nibble >> 3, out.q[k >> 1], 2 * (k & 1));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      out.scale[r] = d * (float)(2 * (three >> 3 * r & 7) + 1) * 0.125f;
      out.offset[r] = 0;
    }
  }
};

// --- whole blocks -----------------------------------------------------------------------------------------------------

template <class Format>
using RunsOf = Runs<Format::runs, Format::group>;

template <class Format>
constexpr int pieces = Format::elements / (16 * Format::runs);

// Rows of a matrix-vector tile: fewer where a piece of one is many bytes.
template <class Format>
constexpr int rows_at_once = Format::runs == 4 || 16 * Format::runs * Format::bytes > 20 * Format::elements ? 2 : 4;

// Element i of a run of 16, zero subtracted.
template <class Format>
REFLEX_BOTH int level(const RunsOf<Format>& runs, int run, int i) {
  const uint32_t byte = byte_of(runs.q[run][i >> 2], i & 3);
  return Format::is_signed ? (int)(int8_t)byte : (int)(byte >> Format::shift(run)) - Format::zero;
}

// The value of a level, rounded as the reference does: product, then sum.
REFLEX_BOTH float value(int level, float scale, float offset) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(__fmul_rn((float)level, scale), offset);
#else
  return (float)level * scale + offset;
#endif
}

// One piece of a block to float32, out being where the block's elements go.
template <class Format>
REFLEX_BOTH void dequantise(const uint8_t* block, int piece, float* out) {
  RunsOf<Format> runs;
  Format::decode(Format::fetch(block, piece), piece, runs);
#pragma unroll
  for (int r = 0; r < Format::runs; ++r) {
    float* to = out + Format::position(piece, r);
    const int g = r / Format::group;
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i] = value(level<Format>(runs, r, i), runs.scale[g], runs.offset[g]);
  }
}

}  // namespace reflex
