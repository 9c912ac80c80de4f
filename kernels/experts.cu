// Routing to experts, their tokens put together, and the weighted sum of what they computed.
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

constexpr int NOWHERE = 0x7fffffff;

// The place of the highest of n numbers, the first of equals, in every lane; NOWHERE where none is a number. NaN is none:
// it marks what is taken.
__device__ __forceinline__ int highest(const float *x, int n) {
    float best = -CUDART_INF_F;
    int at = NOWHERE;
    for (int i = threadIdx.x; i < n; i += WARP)
        if (x[i] > best || (at == NOWHERE && x[i] == x[i])) {
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
// divided by their sum (`normalise`), times scale. Where what is chosen by is not all finite, all weights are NaN, and
// expert 0 takes places that nobody else can. One warp a token, one block; shared: 2 n_expert + n_group floats.
extern "C" __global__ void route(const __grid_constant__ Route a) {
    extern __shared__ int4 memory[];
    float *p = (float *)memory, *selection = p + a.n_expert, *groups = selection + a.n_expert;
    let_successor_start();
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
    bool is_broken = false;
    for (int i = threadIdx.x; i < a.n_expert; i += WARP) {
        if (a.is_softmax) p[i] /= sum;
        selection[i] = p[i] + (a.bias ? a.bias[i] : 0.0f);
        is_broken |= !isfinite(logits[i]) || !isfinite(selection[i]);
    }
    is_broken = __any_sync(~0u, is_broken);
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
            if (threadIdx.x == 0 && g != NOWHERE) groups[g] = CUDART_NAN_F;  // chosen: never again the highest
            __syncwarp();
        }
        for (int i = threadIdx.x; i < a.n_expert; i += WARP)
            if (groups[i / size] == groups[i / size]) selection[i] = -CUDART_INF_F;
        __syncwarp();
    }
    float *out = a.out + blockIdx.x * (int64_t)(2 * a.n_used);
    sum = 0.0f;
    for (int used = 0; used < a.n_used; used++) {
        int place = highest(selection, a.n_expert), i = place == NOWHERE ? 0 : place;
        float weight = is_broken ? CUDART_NAN_F : p[i];
        __syncwarp();
        sum += weight;
        if (threadIdx.x == 0) {
            selection[i] = CUDART_NAN_F;
            out[used] = float(i);
            out[a.n_used + used] = weight;
        }
        __syncwarp();
    }
    float factor = a.normalise ? a.scale / (sum + 1e-20f) : a.scale;
    for (int used = threadIdx.x; used < a.n_used; used += WARP) out[a.n_used + used] *= factor;
}

struct Grouping {
    int4 *tiles;       // (n_tiles): expert, first place in `slots`, number of slots; all 0 for those that nobody needed
    int *slots;        // (n_slots) in order of their experts: slot t * n_used + k is a token's k-th choice
    const float *ids;  // of token t from ids[t * stride] on
    int stride, n_used, n_slots, n_expert;
    int width, n_tiles;
};

// Slots sorted by expert, and each expert's cut into tiles of up to `width`, for grouped.cuh. Which of an expert's places
// a slot gets depends on timing, what is computed for it does not. One block of 1024 threads; shared: 2 n_expert ints.
extern "C" __global__ void __launch_bounds__(1024) group_experts(const __grid_constant__ Grouping a) {
    extern __shared__ int4 memory[];
    int *counts = (int *)memory, *next = counts + a.n_expert;
    for (int e = threadIdx.x; e < a.n_expert; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    let_successor_start();
    wait_for_predecessor();
    auto expert_of = [&](int slot) {
        int id = int(a.ids[slot / a.n_used * (int64_t)a.stride + slot % a.n_used]);
        return id >= 0 && id < a.n_expert ? id : 0;
    };
    for (int slot = threadIdx.x; slot < a.n_slots; slot += blockDim.x) atomicAdd(&counts[expert_of(slot)], 1);
    __syncthreads();
    if (threadIdx.x < WARP) {  // how many slots and tiles the experts before have
        int slots = 0, tiles = 0;
        for (int start = 0; start < a.n_expert; start += WARP) {
            int e = start + threadIdx.x, count = e < a.n_expert ? counts[e] : 0;
            int own = (count + a.width - 1) / a.width, to_slot = count, to_tile = own;
#pragma unroll
            for (int lanes = 1; lanes < WARP; lanes *= 2) {
                int slot = __shfl_up_sync(~0u, to_slot, lanes), tile = __shfl_up_sync(~0u, to_tile, lanes);
                if (threadIdx.x >= lanes) {
                    to_slot += slot;
                    to_tile += tile;
                }
            }
            int first = slots + to_slot - count, tile = tiles + to_tile - own;
            if (e < a.n_expert) next[e] = first;
            for (int i = 0; i < count; i += a.width)
                a.tiles[tile++] = make_int4(e, first + i, min(a.width, count - i), 0);
            slots += __shfl_sync(~0u, to_slot, WARP - 1);
            tiles += __shfl_sync(~0u, to_tile, WARP - 1);
        }
        for (int tile = tiles + threadIdx.x; tile < a.n_tiles; tile += WARP) a.tiles[tile] = make_int4(0, 0, 0, 0);
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < a.n_slots; slot += blockDim.x)
        a.slots[atomicAdd(&next[expert_of(slot)], 1)] = slot;
}

// out (T, width) = sum over a token's experts of weight_k x_k; x (T, n_used * width), routes (T, 2 n_used). Any grid.
extern "C" __global__ void expert_sum(float *out, const float *x, const float *routes, int64_t n, int width, int n_used) {
    let_successor_start();
    wait_for_predecessor();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t token = i / width;
        float sum = 0.0f;
        for (int k = 0; k < n_used; k++)
            sum += x[(token * n_used + k) * width + i % width] * routes[token * 2 * n_used + n_used + k];
        out[i] = sum;
    }
}
