// GGUF block formats: bytes -> levels, scales, offsets. Plain C++ that compiles for the device and for the host.
//
// Every quantised type is   value = scale * (level - zero) + offset   with small integer levels; 16 consecutive
// elements always share scale and offset: a *run*. What one thread reads at a time is a *piece* of a block: 16 bytes or
// so that hold `runs` runs, which need not be neighbours (low and high nibbles of a byte are 16 or 32 elements apart).
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

#include "blocks_basic.cuh"
#include "blocks_iq.cuh"
#include "blocks_k.cuh"
#include "words.cuh"

namespace reflex {

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
