// A stage of few.cuh and grouped.cuh in shared memory: some columns of W's rows as the file has them, and the same columns
// of N rows of x.
#pragma once

#include "pages.cuh"
#include "whole.cuh"

namespace reflex {

template <class Format, int N>
struct Stage {
  using W = Operand<Format>;
  static constexpr int slices = W::block_pieces > 4 ? W::block_pieces / 4 : W::runs == 1 ? 2 : 1;
  static constexpr int columns = 64 * W::runs * slices;
  static constexpr int a_page = page_columns / columns;
  static constexpr int bytes = columns / W::block_elements * W::block_bytes;  // of a row
  static constexpr bool alike = !is_float<Format> && W::block_bytes % 16 == 0;  // every row begins at a multiple of 16
  static constexpr int chunks = alike ? bytes / 16 : (bytes + 30) / 16;         // of 16 bytes, of a row
  // What lanes read at once shall not meet in a bank: rows that are an odd number of 16 bytes apart do not, or, where
  // lanes read chunks 0, 1, 4 and 5 of two rows (whole.cuh), rows that are 2 chunks apart, or 6.
  static constexpr int slots = chunks | 1, slot = 16 * slots;
  static constexpr int few_slots = Whole<Format>::has_minima ? (chunks + 1) / 4 * 4 + 2 : slots;
  static constexpr int x_chunks = (columns / 8 + 2 * Whole<Format>::has_minima) * N;
  static constexpr int x_bytes = 16 * x_chunks;

  // Of the 8 columns that a lane multiplies next: units of different lanes and of different runs share no bit.
  static constexpr int base(int piece) {
    if (Whole<Format>::exists) return 16 * (piece / 2) + 2 * (piece % 2);
    return (piece / W::block_pieces * W::block_elements + W::position(piece % W::block_pieces, 0)) / 8;
  }
  static constexpr int step(int run, int half) {
    return (Whole<Format>::exists ? 4 * run : W::position(0, run) / 8) + half;
  }
  static constexpr bool is_orderly() {
    for (int piece = 0; piece < 4 * slices; ++piece) {
      for (int run = 0; run < W::runs; ++run) {
        const int at = W::position(piece % W::block_pieces, run) - W::position(piece % W::block_pieces, 0);
        if (at != W::position(0, run) || (base(piece) & step(run, 1)) || (base(piece) & step(run, 0))) return false;
      }
    }
    return true;
  }
};

}  // namespace reflex
