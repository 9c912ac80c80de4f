// Matrix products with BF16 weights.
#include "formats.cuh"

REFLEX_FORMAT(bf16, BF16)
REFLEX_FEW_WIDTHS(bf16, BF16)
