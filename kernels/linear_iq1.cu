// Matrix products with IQ1_S and IQ1_M weights.
#include "formats.cuh"

REFLEX_RARE_FORMAT(iq1_s, IQ1_S)
REFLEX_RARE_FORMAT(iq1_m, IQ1_M)
