// Routing to experts, and the weighted sum of what they computed.
#include <math_constants.h>

#include "block.cuh"

struct Route {
    float *out;           // (T, 2 n_used): ids, best first, then weights
    const float *logits;  // (T, n_expert)
    const float *bias;    // (n_expert) or null
    int n_expert, n_used, n_group, n_group_used;
    int is_softmax, top2, normalise;
    float scale;
};

// The place of the highest of n numbers, the first of equals, in every lane. NaN is no number: it marks what is taken.
__device__ __forceinline__ int highest(const float *x, int n) {
    float best = -CUDART_INF_F;
    int at = 0x7fffffff;
    for (int i = threadIdx.x; i < n; i += WARP)
        if (x[i] > best || (at == 0x7fffffff && x[i] == x[i])) {
            best = x[i];
            at = i;
        }
#pragma unroll
    for (int lanes = WARP / 2; lanes; lanes /= 2) {
        float other = __shfl_xor_sync(~0u, best, lanes);
        int place = __shfl_xor_sync(~0u, at, lanes);
        if (other > best || (other == best && place < at)) {
            best = other;
            at = place;
        }
    }
    return at;
}

// p = softmax or sigmoid of the logits. Chosen are the n_used highest of p + bias, within the n_group_used best of n_group
// groups of neighbours, a group counting by its highest, or by the sum of its two highest (`top2`). Their weights are p,
// divided by their sum (`normalise`), times scale. One warp a token, one block; shared: 2 n_expert + n_group floats.
extern "C" __global__ void route(const __grid_constant__ Route a) {
    extern __shared__ int4 memory[];
    float *p = (float *)memory, *selection = p + a.n_expert, *groups = selection + a.n_expert;
    wait_for_predecessor();
    const float *logits = a.logits + blockIdx.x * (int64_t)a.n_expert;
    float largest = -CUDART_INF_F, sum = 0.0f;
    for (int i = threadIdx.x; i < a.n_expert; i += WARP) largest = fmaxf(largest, logits[i]);
    largest = warp_max(largest);
    for (int i = threadIdx.x; i < a.n_expert; i += WARP) {
        p[i] = a.is_softmax ? expf(logits[i] - largest) : sigmoid(logits[i]);
        sum += p[i];
    }
    sum = warp_sum(sum);
    for (int i = threadIdx.x; i < a.n_expert; i += WARP) {
        if (a.is_softmax) p[i] /= sum;
        selection[i] = p[i] + (a.bias ? a.bias[i] : 0.0f);
    }
    __syncwarp();
    if (a.n_group > 1) {
        int size = a.n_expert / a.n_group;
        for (int g = threadIdx.x; g < a.n_group; g += WARP) {
            float first = -CUDART_INF_F, second = -CUDART_INF_F;
            for (int i = g * size; i < (g + 1) * size; i++) {
                if (selection[i] > first) {
                    second = first;
                    first = selection[i];
                } else {
                    second = fmaxf(second, selection[i]);
                }
            }
            groups[g] = a.top2 && size > 1 ? first + second : first;
        }
        __syncwarp();
        for (int used = 0; used < a.n_group_used; used++) {
            int g = highest(groups, a.n_group);
            __syncwarp();
            if (threadIdx.x == 0) groups[g] = CUDART_NAN_F;  // chosen: never again the highest
            __syncwarp();
        }
        for (int i = threadIdx.x; i < a.n_expert; i += WARP)
            if (groups[i / size] == groups[i / size]) selection[i] = -CUDART_INF_F;
        __syncwarp();
    }
    float *out = a.out + blockIdx.x * (int64_t)(2 * a.n_used);
    sum = 0.0f;
    for (int used = 0; used < a.n_used; used++) {
        int i = highest(selection, a.n_expert);
        __syncwarp();
        sum += p[i];
        if (threadIdx.x == 0) {
            selection[i] = CUDART_NAN_F;
            out[used] = float(i);
            out[a.n_used + used] = p[i];
        }
        __syncwarp();
    }
    float factor = a.normalise ? a.scale / (sum + 1e-20f) : a.scale;
    for (int used = threadIdx.x; used < a.n_used; used += WARP) out[a.n_used + used] *= factor;
}

// out (T, width) = sum over a token's experts of weight_k x_k; x (T, n_used * width), routes (T, 2 n_used). Any grid.
extern "C" __global__ void expert_sum(float *out, const float *x, const float *routes, int64_t n, int width, int n_used) {
    wait_for_predecessor();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t token = i / width;
        float sum = 0.0f;
        for (int k = 0; k < n_used; k++)
            sum += x[(token * n_used + k) * width + i % width] * routes[token * 2 * n_used + n_used + k];
        out[i] = sum;
    }
}
