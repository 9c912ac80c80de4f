// Matrix products with TQ1_0 and TQ2_0 weights.
#include "formats.cuh"

REFLEX_RARE_DENSE_FORMAT(tq1_0, TQ1_0)
REFLEX_RARE_DENSE_FORMAT(tq2_0, TQ2_0)
