// Matrix products with BF16 weights.
#include "formats.cuh"

REFLEX_FORMAT(bf16, BF16)
REFLEX_FEW(few_bf16_40, BF16, 40)
