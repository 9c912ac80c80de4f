// Matrix products with Q1_0 and Q2_0 weights.
#include "formats.cuh"

REFLEX_RARE_DENSE_FORMAT(q1_0, Q1_0)
REFLEX_RARE_DENSE_FORMAT(q2_0, Q2_0)
