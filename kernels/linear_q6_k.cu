// Matrix products with Q6_K weights.
#include "formats.cuh"

REFLEX_FORMAT(q6_k, Q6_K)
REFLEX_FEW_TOGETHER(q6_k, Q6_K)
REFLEX_FEW_WIDTHS(q6_k, Q6_K)
