// Matrix products with Q5_0 weights.
#include "formats.cuh"

REFLEX_FORMAT(q5_0, Q5_0)
REFLEX_FEW(few_q5_0_40, Q5_0, 40)
REFLEX_MATVEC(matvec_q5_0_q8_0, Q5_0, Q8_0)
