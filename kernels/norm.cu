// Norms of parts of rows: a row of x is n_group parts of `width` float32, one block a part, T * n_group blocks.
//
//     rms_norm   out = x / sqrt(mean(x^2) + eps) * weight, weight (width) shared by all parts
//     l2_norm    out = x / sqrt(sum(x^2) + eps)
//
// x and out are contiguous and may be the same. Block: whole warps. Sums in float32, per thread, warp, block.
#include "block.cuh"

// The sum of squares of a part.
__device__ __forceinline__ float sum_of_squares(const float *x, int width, float *room) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i] * x[i];
    return block_sum(sum, room);
}

extern "C" __global__ void rms_norm(float *out, const float *x, const float *weight, int width, float eps) {
    __shared__ float room[WARP];
    let_successor_start();
    wait_for_predecessor();
    x += blockIdx.x * (int64_t)width;
    out += blockIdx.x * (int64_t)width;
    float scale = 1.0f / sqrtf(sum_of_squares(x, width, room) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i] * scale * weight[i];
}

extern "C" __global__ void l2_norm(float *out, const float *x, int width, float eps) {
    __shared__ float room[WARP];
    let_successor_start();
    wait_for_predecessor();
    x += blockIdx.x * (int64_t)width;
    out += blockIdx.x * (int64_t)width;
    float scale = 1.0f / sqrtf(sum_of_squares(x, width, room) + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i] * scale;
}
