// Matrix products with Q2_K weights.
#include "formats.cuh"

REFLEX_FORMAT(q2_k, Q2_K)
REFLEX_MATVEC(matvec_q2_k_q3_k, Q2_K, Q3_K)
REFLEX_MATVEC(matvec_q2_k_q4_k, Q2_K, Q4_K)
