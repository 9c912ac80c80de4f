// Log-probabilities of chosen tokens, one block a row of logits:
//
//     out[j] = logits[targets[j]] - ln(sum over t of exp(logits[t]))     for j in [first[row], first[row + 1])
//
// logits (rows, n_vocab) float32, contiguous; first (rows + 1) and targets int32; out float32. Block: whole warps. The
// sum is in float32 per thread, of at most a few hundred terms below 1, then per warp and block.
#include "block.cuh"

extern "C" __global__ void score_rows(float *out, const float *logits, const int *first, const int *targets, int n_vocab) {
    __shared__ float room[WARP];
    wait_for_predecessor();
    const float *row = logits + blockIdx.x * (int64_t)n_vocab;
    float peak = -INFINITY;
    for (int i = threadIdx.x; i < n_vocab; i += blockDim.x) peak = fmaxf(peak, row[i]);
    peak = block_max(peak, room);
    __syncthreads();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n_vocab; i += blockDim.x) sum += expf(row[i] - peak);
    sum = block_sum(sum, room);
    float log_sum = logf(sum);
    for (int j = first[blockIdx.x] + threadIdx.x; j < first[blockIdx.x + 1]; j += blockDim.x)
        out[j] = row[targets[j]] - peak - log_sum;
}
