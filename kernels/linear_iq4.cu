// Matrix products with IQ4_NL and IQ4_XS weights.
#include "formats.cuh"

REFLEX_FORMAT(iq4_nl, IQ4_NL)
REFLEX_FORMAT(iq4_xs, IQ4_XS)
REFLEX_MATVEC(matvec_iq4_xs_q5_k, IQ4_XS, Q5_K)
