// The kernels of one weight format; linear_*.cu are lists of these, so that a start loads only the formats it needs.
#pragma once

#include "few.cuh"
#include "grouped.cuh"
#include "matmul.cuh"
#include "matvec.cuh"

// Of types that no model has experts in.
#define REFLEX_DENSE_FORMAT(NAME, FORMAT)      \
  REFLEX_MATVEC(matvec_##NAME, FORMAT, FORMAT) \
  REFLEX_MATMUL(mma_##NAME##_8, FORMAT, 8)     \
  REFLEX_MATMUL(mma_##NAME##_16, FORMAT, 16)   \
  REFLEX_WIDEN(widen_##NAME, FORMAT)

#define REFLEX_FORMAT(NAME, FORMAT) \
  REFLEX_DENSE_FORMAT(NAME, FORMAT) \
  REFLEX_GROUPED(grouped_##NAME, FORMAT)

// Of the types that most models are made of.
#define REFLEX_FEW_WIDTHS(NAME, FORMAT)  \
  REFLEX_FEW(few_##NAME##_32, FORMAT, 32) \
  REFLEX_FEW(few_##NAME##_40, FORMAT, 40) \
  REFLEX_FEW(few_##NAME##_64, FORMAT, 64)
