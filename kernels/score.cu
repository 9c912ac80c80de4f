// Log-probabilities of chosen tokens: of rows of logits, in two launches.
//
//     log_sums[row] = ln(sum over t of exp(logits[row][t]))
//     out[j] = logits[row][targets[j]] - log_sums[row]     for j in [first[row], first[row + 1])
//
// logits (rows, n_vocab) float32, contiguous; first (rows + 1) and targets int32; out and log_sums float32.
//
// A decision has one row or few, and with a block a row the loads of as few multiprocessors would be all. So score_parts
// has a block for every PART logits of a row, grid (parts, rows), which leaves their peak m and the sum of exp(x - m) in
// parts (rows, parts); score_rows, a block a row, puts them together. Blocks: SCORE_THREADS. Sums are in float32: of 16
// terms a thread, then over warp and block, then over parts, always in the same order.
#include "block.cuh"

constexpr int SCORE_THREADS = 512, LOADS = 16, PART = SCORE_THREADS * LOADS;

extern "C" __global__ void score_parts(float2 *parts, const float *logits, int n_vocab) {
    __shared__ float room[WARP];
    let_successor_start();
    wait_for_predecessor();
    const float *row = logits + blockIdx.y * (int64_t)n_vocab;
    float x[LOADS], peak = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
        int i = blockIdx.x * PART + k * SCORE_THREADS + threadIdx.x;
        x[k] = i < n_vocab ? row[i] : -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < LOADS; k++) peak = fmaxf(peak, x[k]);
    peak = block_max(peak, room);
    __syncthreads();
    // Nothing but -inf adds nothing: it would be taken from itself.
    float below = peak == -INFINITY ? 0.0f : peak;
#pragma unroll
    for (int k = 0; k < LOADS; k++) sum += expf(x[k] - below);
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = make_float2(peak, sum);
}

extern "C" __global__ void score_rows(float *out, float *log_sums, const float2 *parts, int n_parts, const float *logits, const int *first, const int *targets, int n_vocab) {
    __shared__ float room[WARP];
    let_successor_start();
    wait_for_predecessor();
    const float *row = logits + blockIdx.x * (int64_t)n_vocab;
    const float2 *own = parts + blockIdx.x * n_parts;
    float peak = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < n_parts; i += blockDim.x) peak = fmaxf(peak, own[i].x);
    peak = block_max(peak, room);
    __syncthreads();
    for (int i = threadIdx.x; i < n_parts; i += blockDim.x) sum += own[i].y * expf(own[i].x - peak);
    sum = block_sum(sum, room);
    float log_sum = logf(sum);
    if (threadIdx.x == 0) log_sums[blockIdx.x] = peak + log_sum;
    for (int j = first[blockIdx.x] + threadIdx.x; j < first[blockIdx.x + 1]; j += blockDim.x)
        out[j] = row[targets[j]] - peak - log_sum;
}
