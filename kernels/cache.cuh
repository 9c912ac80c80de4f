// The key/value cache of one layer, in pages of 256 positions that every layer has a part of:
//
//     page p, this layer:  keys   half  [256][n_head_kv][d]
//                          values half  [256][n_head_kv][d_v]
//                          key and value scales float [2][256][n_head_kv]
//
// so a longer context is more pages behind the ones there are, and a prefix is a few contiguous runs. A row is what was
// computed, divided by its scale: 1, or the power of two that keeps the row within half precision's range.
#pragma once

#include "block.cuh"

constexpr int PAGE = 256;
constexpr int CACHE_LARGEST_EXPONENT = 14;  // rows are kept below 2^15, half of what half precision holds

struct Cache {
    uint8_t *layer;  // this layer's part of page 0
    int64_t page_bytes;
    int n_head_kv, d, d_v, unused;

    __device__ __forceinline__ uint8_t *page(int position) const { return layer + position / PAGE * page_bytes; }
    __device__ __forceinline__ half *key(int position, int head) const {
        return (half *)page(position) + (position % PAGE * n_head_kv + head) * d;
    }
    __device__ __forceinline__ half *value(int position, int head) const {
        return (half *)page(position) + PAGE * n_head_kv * d + (position % PAGE * n_head_kv + head) * d_v;
    }
    __device__ __forceinline__ float *scales(int position) const {
        return (float *)((half *)page(position) + PAGE * n_head_kv * (d + d_v));
    }
    __device__ __forceinline__ float *key_scale(int position, int head) const {
        return scales(position) + position % PAGE * n_head_kv + head;
    }
    __device__ __forceinline__ float *value_scale(int position, int head) const {
        return scales(position) + (PAGE + position % PAGE) * n_head_kv + head;
    }
};

// One warp stores one row of `width` float32.
__device__ __forceinline__ void store_row(half *to, float *scale, const float *row, int width) {
    int lane = threadIdx.x % WARP;
    float largest = 0.0f;
    for (int i = lane; i < width; i += WARP) largest = fmaxf(largest, fabsf(row[i]));
    int e = exponent_of(warp_max(largest)) - CACHE_LARGEST_EXPONENT;
    e = e < 0 ? 0 : e > 126 ? 126 : e;
    float shrink = power_of_two(-e);
    for (int i = lane; i < width; i += WARP) to[i] = __float2half_rn(row[i] * shrink);
    if (lane == 0) *scale = power_of_two(e);
}
