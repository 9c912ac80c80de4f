// Block formats of 32 to 128 elements under one scale, and ternary ones; the terms are those of dequant.cuh.
#pragma once

#include "words.cuh"

namespace reflex {

// --- 32 elements, one scale ----------------------------------------------------------------------------------------

// Nibbles of 16 bytes, four words from `first`: the low ones are elements 0..15, the high ones, left where they are,
// 16..31.
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

// --- one to two bits -----------------------------------------------------------------------------------------------

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
  static REFLEX_BOTH constexpr int position(int piece, int run) {
    return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1);
  }
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

}  // namespace reflex
