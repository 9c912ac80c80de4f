// Matrix products with Q4_0 weights.
#include "formats.cuh"

REFLEX_FORMAT(q4_0, Q4_0)
REFLEX_FEW(few_q4_0_40, Q4_0, 40)
