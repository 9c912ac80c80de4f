// Rows of x as few.cuh reads them: its header says why. A page is 256 columns of N rows: 32 units of 8 columns, 16 bytes
// a row, and two more with the sums over every 32 columns, divided by `page_sum` so that they fit halves, and with what
// rounding lost of these.
#pragma once

#include <stdint.h>

namespace reflex {

constexpr int page_columns = 256;
constexpr float page_sum = 32;
template <int N>
constexpr int page_chunks = (page_columns / 8 + 2) * N;  // of 16 bytes

// Row r of unit u is at place r ^ turn(u) of the unit. Bits 1 or 3 of u decide one bit and bits 2 or 4 the other: the
// lanes of a row read units that differ in two neighbouring bits, or in bits 1 and 4.
__host__ __device__ constexpr int turn(int unit) {
  return ((unit >> 1 ^ unit >> 3) & 1) << 1 | ((unit >> 2 ^ unit >> 4) & 1) << 2;
}

}  // namespace reflex
