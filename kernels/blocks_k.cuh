// k-quants: blocks of 256 elements, small integer scales under one or two half-precision ones; terms: dequant.cuh.
#pragma once

#include "words.cuh"

namespace reflex {

struct Q2_K {  // scales[16], qs[64], d, dmin f16
  static constexpr int elements = 256, bytes = 84, alignment = 4, runs = 4, group = 1, zero = 0, greatest = 3;
  static constexpr bool has_offset = true, is_signed = false;
  struct Raw {
    Words<4, 4> qs;
    Words<2, 4> scales;
    Words<1, 4> d;
  };
  static REFLEX_BOTH constexpr int position(int piece, int run) {
    return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1);
  }
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
  static REFLEX_BOTH constexpr int position(int piece, int run) {
    return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1);
  }
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
// k_numbers: the two scales, then the two minima, a byte each.
REFLEX_BOTH uint32_t k_numbers(const Words<4, 16>& w, int pair) {
  const uint32_t half = pair & 1 ? 0x7632 : 0x5410;  // two bytes of one word, two of another
  const uint32_t six = permute(w[1], w[2], half), four = permute(w[3], w[3] >> 4, half);
  return (pair & 2 ? (four & 0x0f0f0f0f) | (six >> 2 & 0xf0f0f0f0) : six) & 0x3f3f3f3f;
}
REFLEX_BOTH void k_scales(const Words<4, 16>& w, int pair, float (&scale)[2], float (&offset)[2]) {
  const float d = half_bits(w[0]), dmin = half_bits(w[0] >> 16);
  const uint32_t both = k_numbers(w, pair);
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
  static REFLEX_BOTH constexpr int position(int piece, int run) {
    return 128 * (piece >> 1) + 32 * run + 16 * (piece & 1);
  }
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
    const uint32_t numbers = scales(raw, piece);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      out.scale[r] = d * (float)(int8_t)byte_of(numbers, r);
      out.offset[r] = 0;
    }
  }
  // Of the four runs, a signed byte each.
  static REFLEX_BOTH uint32_t scales(const Raw& raw, int piece) {
    return permute(raw.scales[0], raw.scales[1], piece & 1 ? 0x7531 : 0x6420);
  }
};

}  // namespace reflex
