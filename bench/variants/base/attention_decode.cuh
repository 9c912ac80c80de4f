// Attention of one token over the whole cache, its own key and value included.
//
//     out[head] = sum over positions s of softmax(scale * q . k_s)[s] v_s, query head h reading head h / (heads a group)
//
// Grid (n_splits, n_head_kv, groups of HEADS query heads), THREADS threads. Each block takes an equal share of the
// positions and HEADS query heads that read the same key head; LANES lanes share a position, 8 numbers each (d, d_v <= 8
// LANES, multiples of 8). Blocks leave their maxima, sums and outputs in `partial`; the last to finish of a group, told by
// its ticket, adds them up in the order of the splits, so the result doesn't depend on who it was.
//
// With `fused`, q, k and v come from the projections: the block finishes them (heads.cuh), and whoever has the newest
// position puts its key and value into the cache. Without, q is finished and the cache complete.
#pragma once

#include <math_constants.h>

#include "heads.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int CHUNK = 256;  // positions whose scores are held at a time
constexpr float LOG2_E = 1.4426950408889634f;

struct Decode {
    Heads h;
    float *out;      // (n_head * d_v)
    float *partial;  // (n_head, n_splits, d_v + 2): weighted values, maximum, sum
    int *tickets;    // (gridDim.y * gridDim.z), zero, and zero again afterwards
    float scale;
    int fused;
};

template <int LANES>
__device__ __forceinline__ void load8(float *x, const half *row, int lane, int width) {
    if (lane * 8 < width) {
        int4 raw = *(const int4 *)(row + lane * 8);
        const half2 *pairs = (const half2 *)&raw;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 pair = __half22float2(pairs[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = 0.0f;
    }
}

// Positions a block takes: whole steps of the block.
__device__ __forceinline__ int share_of(int n, int n_splits, int step) {
    return ((n + n_splits - 1) / n_splits + step - 1) / step * step;
}

// Asks for the first chunk of this block's keys and values. They are of earlier steps, so it need not wait; should `n` be
// of an earlier step too, less is asked for than will be read.
__device__ __forceinline__ void prefetch_rows(const Cache &c, int head, int n, int n_splits, int step) {
    constexpr int LINE = 128;
    int share = share_of(n, n_splits, step), begin = min(n, int(blockIdx.x) * share);
    int rows = min(min(n - begin, share), CHUNK), k_lines = (c.d * 2 + LINE - 1) / LINE, v_lines = (c.d_v * 2 + LINE - 1) / LINE;
    for (int i = threadIdx.x; i < rows * (k_lines + v_lines); i += THREADS) {
        int position = begin + i / (k_lines + v_lines), line = i % (k_lines + v_lines);
        const half *row = line < k_lines ? c.key(position, head) : c.value(position, head);
        prefetch((const char *)row + (line < k_lines ? line : line - k_lines) * LINE);
    }
}

template <int LANES, int HEADS>
__device__ __forceinline__ void attend(const Decode &a) {
    constexpr int ROWS = WARP / LANES;         // positions a warp takes at a time
    constexpr int STEP = ROWS * WARPS;         // positions the block takes at a time
    __shared__ float queries[HEADS][LANES * 8];  // later the sums of the values
    __shared__ float scores[HEADS][CHUNK];
    __shared__ float key_row[LANES * 8];
    constexpr int SUMMED = HEADS * LANES <= 64 ? HEADS : 64 / LANES;  // heads whose outputs the warps add up at a time
    __shared__ float by_warp[WARPS][SUMMED][LANES * 8];
    __shared__ float maxima[HEADS], sums[HEADS], shrinks[HEADS];
    __shared__ int is_last;
    const Heads &h = a.h;
    const Cache &c = h.cache;
    prefetch_rows(c, blockIdx.y, *(volatile const int *)h.past + 1, gridDim.x, STEP);
    wait_for_predecessor();
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, sub = lane % LANES, row = warp * ROWS + lane / LANES;
    int kv = blockIdx.y, group = h.n_head / c.n_head_kv, first = blockIdx.z * HEADS;
    int heads = min(HEADS, group - first), head0 = kv * group + first;
    int n_splits = gridDim.x, n = *h.past + 1;
    int share = share_of(n, n_splits, STEP);
    int begin = min(n, int(blockIdx.x) * share), end = min(n, begin + share);

    for (int g = warp; g < HEADS; g += WARPS) {
        for (int i = lane; i < LANES * 8; i += WARP) queries[g][i] = 0.0f;
        __syncwarp();
        if (g < heads) {
            const float *q = h.q + (head0 + g) * c.d;
            if (a.fused) {
                finish_head(h, queries[g], q, h.q_norm, 0);
            } else {
                for (int i = lane; i < c.d; i += WARP) queries[g][i] = q[i];
            }
        }
    }
    if (a.fused && begin < end && end == n) {
        if (warp == WARPS - 1) store_key(h, key_row, 0, kv);
        if (warp == WARPS - 2) store_value(h, 0, kv);
    }
    if (threadIdx.x < HEADS) {
        maxima[threadIdx.x] = -CUDART_INF_F;
        sums[threadIdx.x] = 0.0f;
    }
    __syncthreads();
    float q[HEADS][8], mixed[HEADS][8];
    float factor = a.scale * LOG2_E;
#pragma unroll
    for (int g = 0; g < HEADS; g++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[g][i] = queries[g][sub * 8 + i] * factor;
            mixed[g][i] = 0.0f;
        }
    for (int start = begin; start < end; start += CHUNK) {
        int stop = min(end, start + CHUNK), filled = stop - start;
#pragma unroll (HEADS < 4 ? 4 : 2)
        for (int p = start + row; p < start + CHUNK; p += STEP) {
            float k[8];
            bool there = p < stop;
            load8<LANES>(k, c.key(there ? p : start, kv), sub, c.d);
            float key_scale = *c.key_scale(there ? p : start, kv);
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                float s = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) s += q[g][i] * k[i];
#pragma unroll
                for (int lanes = LANES / 2; lanes; lanes /= 2) s += __shfl_xor_sync(~0u, s, lanes);
                if (sub == 0 && there) scores[g][p - start] = s * key_scale;
            }
            if (p - row - start + STEP >= filled) break;
        }
        __syncthreads();
        for (int g = warp; g < heads; g += WARPS) {
            float largest = maxima[g];
            for (int i = lane; i < filled; i += WARP) largest = fmaxf(largest, scores[g][i]);
            largest = warp_max(largest);
            float reference = largest == -CUDART_INF_F ? 0.0f : largest, sum = 0.0f;
            for (int i = lane; i < filled; i += WARP) {
                float weight = exp2f(scores[g][i] - reference);
                scores[g][i] = weight;
                sum += weight;
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                float shrink = exp2f(maxima[g] - reference);
                shrinks[g] = shrink;
                sums[g] = sums[g] * shrink + sum;
                maxima[g] = largest;
            }
        }
        __syncthreads();
#pragma unroll
        for (int g = 0; g < HEADS; g++)
            if (g < heads)
#pragma unroll
                for (int i = 0; i < 8; i++) mixed[g][i] *= shrinks[g];
#pragma unroll (HEADS < 4 ? 4 : 2)
        for (int p = start + row; p < stop; p += STEP) {
            float v[8];
            load8<LANES>(v, c.value(p, kv), sub, c.d_v);
            float value_scale = *c.value_scale(p, kv);
#pragma unroll
            for (int g = 0; g < HEADS; g++)
                if (g < heads) {
                    float weight = scores[g][p - start] * value_scale;
#pragma unroll
                    for (int i = 0; i < 8; i++) mixed[g][i] += weight * v[i];
                }
        }
        __syncthreads();
    }
    // Sum over the rows of each warp, then over the warps, in their order.
#pragma unroll
    for (int g = 0; g < HEADS; g++)
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int lanes = LANES; lanes < WARP; lanes *= 2) mixed[g][i] += __shfl_xor_sync(~0u, mixed[g][i], lanes);
#pragma unroll
    for (int g0 = 0; g0 < HEADS; g0 += SUMMED) {
        if (lane < LANES)
#pragma unroll
            for (int g = 0; g < SUMMED; g++)
#pragma unroll
                for (int i = 0; i < 8; i++) by_warp[warp][g][sub * 8 + i] = mixed[g0 + g][i];
        __syncthreads();
        for (int i = threadIdx.x; i < SUMMED * LANES * 8; i += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += (&by_warp[w][0][0])[i];
            (&queries[g0][0])[i] = sum;
        }
        __syncthreads();
    }
    if (n_splits == 1) {
        for (int g = warp; g < heads; g += WARPS)
            for (int i = lane; i < c.d_v; i += WARP) a.out[(head0 + g) * c.d_v + i] = queries[g][i] / sums[g];
        return;
    }
    int width = c.d_v + 2;
    for (int g = warp; g < heads; g += WARPS) {
        float *partial = a.partial + ((head0 + g) * n_splits + blockIdx.x) * width;
        for (int i = lane; i < c.d_v; i += WARP) partial[i] = queries[g][i];
        if (lane == 0) {
            partial[c.d_v] = maxima[g];
            partial[c.d_v + 1] = sums[g];
        }
    }
    __threadfence();
    __syncthreads();
    int *ticket = a.tickets + kv * gridDim.z + blockIdx.z;
    if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1) == n_splits - 1;
    __syncthreads();
    if (is_last) {
        __threadfence();
        for (int g = warp; g < heads; g += WARPS) {
            const float *partial = a.partial + (head0 + g) * n_splits * width;
            // Lane s keeps what split s, and s + 32, counts for.
            float counts[2], own[2], largest = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                int s = lane + k * WARP;
                counts[k] = s < n_splits ? __ldcg(partial + s * width + c.d_v) : -CUDART_INF_F;
                own[k] = s < n_splits ? __ldcg(partial + s * width + c.d_v + 1) : 0.0f;
                largest = fmaxf(largest, counts[k]);
            }
            largest = warp_max(largest);
            if (largest == -CUDART_INF_F) largest = 0.0f;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                counts[k] = exp2f(counts[k] - largest);
                sum += own[k] * counts[k];
            }
            float inverse = 1.0f / warp_sum(sum);
            float values[LANES * 8 / WARP] = {};
            for (int s = 0; s < n_splits; s++) {
                float count = __shfl_sync(~0u, s < WARP ? counts[0] : counts[1], s % WARP);
#pragma unroll
                for (int k = 0; k < LANES * 8 / WARP; k++) {
                    int i = lane + k * WARP;
                    if (i < c.d_v) values[k] += __ldcg(partial + s * width + i) * count;
                }
            }
#pragma unroll
            for (int k = 0; k < LANES * 8 / WARP; k++) {
                int i = lane + k * WARP;
                if (i < c.d_v) a.out[(head0 + g) * c.d_v + i] = values[k] * inverse;
            }
        }
        if (threadIdx.x == 0) *ticket = 0;
    }
}

#define ATTENTION(LANES, HEADS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_decode_##LANES##_##HEADS(                         \
        const __grid_constant__ Decode a) {                                                                              \
        attend<LANES, HEADS>(a);                                                                                         \
    }
#define ATTENTIONS(LANES) ATTENTION(LANES, 1) ATTENTION(LANES, 2) ATTENTION(LANES, 4) ATTENTION(LANES, 8)
