// Matrix products with F16 weights.
#include "formats.cuh"

REFLEX_FORMAT(f16, F16)
REFLEX_FEW_WIDTHS(f16, F16)
