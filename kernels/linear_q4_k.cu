// Matrix products with Q4_K weights.
#include "formats.cuh"

REFLEX_FORMAT(q4_k, Q4_K)
REFLEX_FEW_TOGETHER(q4_k, Q4_K)
REFLEX_FEW_WIDTHS(q4_k, Q4_K)
REFLEX_MATVEC(matvec_q4_k_q5_k, Q4_K, Q5_K)
REFLEX_MATVEC(matvec_q4_k_q6_k, Q4_K, Q6_K)
