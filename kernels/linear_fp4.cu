// Matrix products with MXFP4 and NVFP4 weights.
#include "formats.cuh"

REFLEX_FORMAT(mxfp4, MXFP4)
REFLEX_RARE_FORMAT(nvfp4, NVFP4)  // none of 8 rows: sm_120 is full
REFLEX_FEW(few_nvfp4_64, NVFP4, 64)
