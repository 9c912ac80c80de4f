// Matrix products with Q5_1 weights.
#include "formats.cuh"

REFLEX_FORMAT(q5_1, Q5_1)
