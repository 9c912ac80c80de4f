// Matrix products with F16 weights.
#include "formats.cuh"

REFLEX_FORMAT(f16, F16)
REFLEX_FEW(few_f16_40, F16, 40)
