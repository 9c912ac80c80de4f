// Matrix products with IQ3_XXS and IQ3_S weights.
#include "formats.cuh"

REFLEX_RARE_FORMAT(iq3_xxs, IQ3_XXS)
REFLEX_RARE_FORMAT(iq3_s, IQ3_S)
