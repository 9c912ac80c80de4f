// Matrix products with MXFP4 weights.
#include "formats.cuh"

REFLEX_FORMAT(mxfp4, MXFP4)
