// What happens to the heads of q, k and v between their projections and attention: QK-norm, rotation, the cache.
//
//     norm (where its weight is given)   x / sqrt(mean(x^2) + eps) * weight over a head's d numbers
//     rotation (where a table is given)  of dims [offset, offset + n_rot), pair i turned by the table's (cos, sin)[i]:
//                                        pairs are (i, i + n_rot/2) where `neox`, else (2i, 2i + 1)
//
// q (T, q_stride), k (T, k_stride), v (T, v_stride): float32 rows whose first heads * d numbers are read.
#pragma once

#include "cache.cuh"

struct Heads {
    const float *q, *k, *v;
    const float *q_norm, *k_norm;  // (d) each, or null
    const float2 *table;           // (T, n_rot/2), or null
    const int *past;               // tokens in the cache before the step
    Cache cache;
    int q_stride, k_stride, v_stride;
    int n_head, offset, n_rot, neox;
    float eps;
};

// One warp normalises and rotates one head of d numbers, from global memory into `row` in shared memory.
__device__ __forceinline__ void finish_head(const Heads &h, float *row, const float *x, const float *norm, int token) {
    int lane = threadIdx.x % WARP, d = h.cache.d;
    float sum = 0.0f;
    for (int i = lane; i < d; i += WARP) {
        row[i] = x[i];
        sum += x[i] * x[i];
    }
    __syncwarp();
    if (norm) {
        float scale = 1.0f / sqrtf(warp_sum(sum) / d + h.eps);
        for (int i = lane; i < d; i += WARP) row[i] *= scale * norm[i];
        __syncwarp();
    }
    if (h.table) {
        int pairs = h.n_rot / 2;
        for (int i = lane; i < pairs; i += WARP) {
            float2 turn = h.table[token * pairs + i];
            int first = h.offset + (h.neox ? i : 2 * i);
            int second = first + (h.neox ? pairs : 1);
            float a = row[first], b = row[second];
            row[first] = a * turn.x - b * turn.y;
            row[second] = a * turn.y + b * turn.x;
        }
        __syncwarp();
    }
}

// One warp finishes and stores the key, or copies and stores the value, of one head. `row`: d or d_v floats, shared.
__device__ __forceinline__ void store_key(const Heads &h, float *row, int token, int head) {
    int position = *h.past + token;
    finish_head(h, row, h.k + token * (int64_t)h.k_stride + head * h.cache.d, h.k_norm, token);
    store_row(h.cache.key(position, head), h.cache.key_scale(position, head), row, h.cache.d);
}

__device__ __forceinline__ void store_value(const Heads &h, int token, int head) {
    int position = *h.past + token;
    const float *x = h.v + token * (int64_t)h.v_stride + head * h.cache.d_v;
    store_row(h.cache.value(position, head), h.cache.value_scale(position, head), x, h.cache.d_v);
}
