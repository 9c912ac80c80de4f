// Matrix products with Q5_K weights.
#include "formats.cuh"

REFLEX_FORMAT(q5_k, Q5_K)
REFLEX_FEW_TOGETHER(q5_k, Q5_K)
REFLEX_FEW(few_q5_k_40, Q5_K, 40)
REFLEX_MATVEC(matvec_q5_k_q6_k, Q5_K, Q6_K)
