// Rows of x as few.cuh reads them: its header says why. A page is 256 columns of N rows: 32 units of 8 columns, 16 bytes
// a row, and two more with the sums over every 32 columns, divided by `page_sum` so that they fit halves, and with what
// rounding lost of these. `prepare_pages` (rows.cu) writes them and few.cuh reads them, for one and the same target: where
// `has_groups`, weights of whole.cuh find the elements woven, in order of rows, and `turn` is not used.
#pragma once

#include <stdint.h>

namespace reflex {

constexpr int page_columns = 256;
constexpr float page_sum = 32;
__host__ __device__ constexpr int page_chunks(int n_rows) { return (page_columns / 8 + 2) * n_rows; }  // of 16 bytes

// Row r of unit u is at place r ^ turn(u) of the unit. Bits 1 and 3 of u decide one bit together, bits 2 and 4 the other:
// the lanes of a row read units that differ in two neighbouring bits, or in bits 1 and 4.
__host__ __device__ constexpr int turn(int unit) {
  return ((unit >> 1 ^ unit >> 3) & 1) << 1 | ((unit >> 2 ^ unit >> 4) & 1) << 2;
}

}  // namespace reflex
