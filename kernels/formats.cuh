// The kernels of one weight format; linear_*.cu are lists of these, so that a start loads only the formats it needs.
#pragma once

#include "few.cuh"
#include "grouped.cuh"
#include "matmul.cuh"
#include "matvec.cuh"

// Of types that few models have, and none as a whole: 2 to 16 rows at once are one width.
#define REFLEX_RARE_DENSE_FORMAT(NAME, FORMAT)  \
  REFLEX_MATVEC(matvec_##NAME, FORMAT, FORMAT) \
  REFLEX_MATMUL(mma_##NAME##_16, FORMAT, 16)   \
  REFLEX_WIDEN(widen_##NAME, FORMAT)

// DENSE: no model has experts in them.
#define REFLEX_RARE_FORMAT(NAME, FORMAT) \
  REFLEX_RARE_DENSE_FORMAT(NAME, FORMAT) \
  REFLEX_GROUPED(grouped_##NAME, FORMAT)

#define REFLEX_FORMAT(NAME, FORMAT)          \
  REFLEX_RARE_FORMAT(NAME, FORMAT)           \
  REFLEX_MATMUL(mma_##NAME##_8, FORMAT, 8)   \
  REFLEX_FEW(few_##NAME##_64, FORMAT, 64)

// Of k-quants where four warps multiply together (`has_groups` of mma.cuh): up to 16 rows too.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define REFLEX_FEW_TOGETHER(NAME, FORMAT) REFLEX_FEW(few_##NAME##_16, FORMAT, 16)
#else
#define REFLEX_FEW_TOGETHER(NAME, FORMAT)
#endif

// Of the types that most models are made of.
#define REFLEX_FEW_WIDTHS(NAME, FORMAT)   \
  REFLEX_FEW(few_##NAME##_32, FORMAT, 32) \
  REFLEX_FEW(few_##NAME##_40, FORMAT, 40)
