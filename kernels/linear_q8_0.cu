// Matrix products with Q8_0 weights.
#include "formats.cuh"

REFLEX_FORMAT(q8_0, Q8_0)
REFLEX_FEW_WIDTHS(q8_0, Q8_0)
