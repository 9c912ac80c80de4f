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

// One warp normalises and rotates one head of up to N * WARP numbers. Everything is asked for before any of it is used:
// the norm's weights by read_norm, which need not wait for the predecessor, the rest by read.
template <int N>
struct Head {
    float x[N], norm[N];
    float2 turns[N / 2];

    __device__ __forceinline__ void read_norm(const Heads &h, const float *weight) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            int i = threadIdx.x % WARP + k * WARP;
            norm[k] = weight && i < h.cache.d ? weight[i] : 1.0f;
        }
    }

    __device__ __forceinline__ void read(const Heads &h, const float *from, int token) {
        int pairs = h.n_rot / 2;
#pragma unroll
        for (int k = 0; k < N; k++) {
            int i = threadIdx.x % WARP + k * WARP;
            x[k] = i < h.cache.d ? from[i] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            int i = threadIdx.x % WARP + k * WARP;
            turns[k] = h.table && i < pairs ? h.table[token * pairs + i] : make_float2(1.0f, 0.0f);
        }
    }

    // Into `row` in shared memory; `is_normed`: read_norm had weights.
    __device__ __forceinline__ void finish(const Heads &h, float *row, bool is_normed) const {
        int lane = threadIdx.x % WARP, d = h.cache.d;
        float scale = 1.0f;
        if (is_normed) {
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < N; k++) sum += x[k] * x[k];
            scale = 1.0f / sqrtf(warp_sum(sum) / d + h.eps);
        }
#pragma unroll
        for (int k = 0; k < N; k++)
            if (lane + k * WARP < d) row[lane + k * WARP] = x[k] * (scale * norm[k]);
        __syncwarp();
        if (h.table) {
            int pairs = h.n_rot / 2;
#pragma unroll
            for (int k = 0; k < N / 2; k++) {
                int i = lane + k * WARP;
                if (i >= pairs) continue;
                int first = h.offset + (h.neox ? i : 2 * i);
                int second = first + (h.neox ? pairs : 1);
                float a = row[first], b = row[second];
                row[first] = a * turns[k].x - b * turns[k].y;
                row[second] = a * turns[k].y + b * turns[k].x;
            }
            __syncwarp();
        }
    }
};

// One warp finishes a key, whose norm has been read, and stores it; or copies and stores a value. `row`: d floats, shared.
template <int N>
__device__ __forceinline__ void store_key(Head<N> &key, const Heads &h, float *row, int token, int head) {
    int position = *h.past + token;
    key.read(h, h.k + token * (int64_t)h.k_stride + head * h.cache.d, token);
    key.finish(h, row, h.k_norm);
    store_row(h.cache.key(position, head), h.cache.key_scale(position, head), row, h.cache.d);
}

__device__ __forceinline__ void store_value(const Heads &h, int token, int head) {
    int position = *h.past + token;
    const float *x = h.v + token * (int64_t)h.v_stride + head * h.cache.d_v;
    store_row(h.cache.value(position, head), h.cache.value_scale(position, head), x, h.cache.d_v);
}
