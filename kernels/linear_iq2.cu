// Matrix products with IQ2_XXS and IQ2_XS and IQ2_S weights.
#include "formats.cuh"

REFLEX_RARE_FORMAT(iq2_xxs, IQ2_XXS)
REFLEX_RARE_FORMAT(iq2_xs, IQ2_XS)
REFLEX_RARE_FORMAT(iq2_s, IQ2_S)
