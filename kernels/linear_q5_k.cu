// Matrix products with Q5_K weights.
#include "formats.cuh"

REFLEX_FORMAT(q5_k, Q5_K)
REFLEX_FEW_WIDTHS(q5_k, Q5_K)
REFLEX_MATVEC(matvec_q5_k_q6_k, Q5_K, Q6_K)
