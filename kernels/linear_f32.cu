// Matrix products with F32 weights.
#include "formats.cuh"

REFLEX_MATVEC(matvec_f32, F32, F32)
