// Matrix products with Q4_1 weights.
#include "formats.cuh"

REFLEX_FORMAT(q4_1, Q4_1)
