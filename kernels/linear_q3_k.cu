// Matrix products with Q3_K weights.
#include "formats.cuh"

REFLEX_FORMAT(q3_k, Q3_K)
REFLEX_MATVEC(matvec_q3_k_q4_k, Q3_K, Q4_K)
REFLEX_MATVEC(matvec_q3_k_q5_k, Q3_K, Q5_K)
