// Block formats whose elements are looked up: 4-bit values from a list, lattice points from a codebook; terms: dequant.cuh.
#pragma once

#include "blocks_basic.cuh"
#include "codebooks.cuh"
#include "words.cuh"

namespace reflex {

// --- 4-bit values from a list --------------------------------------------------------------------------------------

// The values of eight nibbles from a table of 16 bytes, in the order of the nibbles.
REFLEX_BOTH void look_up(const uint32_t (&table)[4], uint32_t nibbles, uint32_t& first, uint32_t& second) {
  const uint32_t index = nibbles & 0x77777777, upper = nibbles >> 1 & 0x44444444;
  first = permute(permute(table[0], table[1], index), permute(table[2], table[3], index), (upper & 0xffff) | 0x3210);
  second =
      permute(permute(table[0], table[1], index >> 16), permute(table[2], table[3], index >> 16), upper >> 16 | 0x3210);
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
  static REFLEX_BOTH Raw fetch(Bytes block, int piece) {
    return Q4_0::fetch(block, piece);
  }
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
  // No sign, 4 bits of exponent with bias 7, 3 of mantissa: 256 times what a half makes of them. Halved as the table is
  // doubled.
  static REFLEX_BOTH float half_ue4m3(uint32_t x) { return x == 0x7f ? 0.0f : half_bits((x & 0x7f) << 7) * 128; }
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

// --- lattice points: 8 (or 4) elements are one index into a codebook -----------------------------------------------
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

struct
    IQ1_M {  // qs[32], qh[16]: nibbles of 3 bits of index and a bit for down; u16[4] of four 3-bit scales, a nibble of d
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

}  // namespace reflex
