// Attention of one token (attention_decode.cuh) for heads of up to 64 numbers.
#include "attention_decode.cuh"

ATTENTIONS(8)
