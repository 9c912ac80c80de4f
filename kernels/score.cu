// Log-probabilities of chosen tokens, one block a row of logits:
//
//     out[j] = logits[targets[j]] - ln(sum over t of exp(logits[t]))     for j in [first[row], first[row + 1])
//
// logits (rows, n_vocab) float32, contiguous; first (rows + 1) and targets int32; out float32. Block: whole warps. The
// sum is in float32 per thread, of at most a few hundred terms below 1, then per warp and block.
#include "block.cuh"

// A decision has one row or few, and each has a multiprocessor to itself: what its block takes is the time of its loads,
// so that each thread has this many of them under way at once.
constexpr int LOADS = 16;

// f(x) for a thread's share of a row, in order, then for -inf, which changes neither sum nor peak, up to whole turns.
template <typename F>
__device__ __forceinline__ void for_each(const float *row, int n, F f) {
    for (int start = threadIdx.x; start < n; start += LOADS * blockDim.x) {
        float x[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            int i = start + k * blockDim.x;
            x[k] = i < n ? row[i] : -INFINITY;
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) f(x[k]);
    }
}

extern "C" __global__ void score_rows(float *out, const float *logits, const int *first, const int *targets, int n_vocab) {
    __shared__ float room[WARP];
    wait_for_predecessor();
    const float *row = logits + blockIdx.x * (int64_t)n_vocab;
    float peak = -INFINITY;
    for_each(row, n_vocab, [&](float x) { peak = fmaxf(peak, x); });
    peak = block_max(peak, room);
    __syncthreads();
    float sum = 0.0f;
    for_each(row, n_vocab, [&](float x) { sum += expf(x - peak); });
    sum = block_sum(sum, room);
    float log_sum = logf(sum);
    for (int j = first[blockIdx.x] + threadIdx.x; j < first[blockIdx.x + 1]; j += blockDim.x)
        out[j] = row[targets[j]] - peak - log_sum;
}
