// Matrix products with NVFP4 weights.
#include "formats.cuh"

REFLEX_RARE_FORMAT(nvfp4, NVFP4)  // none of 8 rows: sm_120 is full
REFLEX_FEW(few_nvfp4_64, NVFP4, 64)
