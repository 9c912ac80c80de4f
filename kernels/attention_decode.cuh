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

// Eight numbers of a row of the cache, as they lie there, and the row's scale.
struct Eight {
    int4 bits;
    float scale;

    __device__ __forceinline__ void read(const half *row, const float *row_scale, int lane, int width) {
        bits = lane * 8 < width ? *(const int4 *)(row + lane * 8) : make_int4(0, 0, 0, 0);
        scale = *row_scale;
    }
    __device__ __forceinline__ void unpack(float *x) const {
        const half2 *pairs = (const half2 *)&bits;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 pair = __half22float2(pairs[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    }
};

// Positions a block takes: whole steps of the block.
__device__ __forceinline__ int share_of(int n, int n_splits, int step) {
    return ((n + n_splits - 1) / n_splits + step - 1) / step * step;
}

// Asks for keys and values of positions [begin, end).
__device__ __forceinline__ void prefetch_rows(const Cache &c, int head, int begin, int end) {
    constexpr int LINE = 128;
    int k_lines = (c.d * 2 + LINE - 1) / LINE, v_lines = (c.d_v * 2 + LINE - 1) / LINE;
    for (int i = threadIdx.x; i < (end - begin) * (k_lines + v_lines); i += THREADS) {
        int position = begin + i / (k_lines + v_lines), line = i % (k_lines + v_lines);
        const half *row = line < k_lines ? c.key(position, head) : c.value(position, head);
        prefetch((const char *)row + (line < k_lines ? line : line - k_lines) * LINE);
    }
}

template <int LANES, int HEADS>
__device__ __forceinline__ void attend(const Decode &a) {
    constexpr int ROWS = WARP / LANES;         // positions a warp takes at a time
    constexpr int STEP = ROWS * WARPS;         // positions the block takes at a time
    constexpr int BATCH = HEADS < 4 && LANES < 32 ? 4 : 2;  // steps whose rows are read together, one batch ahead
    constexpr int A_LANE = LANES * 8 / WARP;   // numbers of a head
    __shared__ float queries[HEADS][LANES * 8];  // later the sums of the values
    __shared__ float scores[HEADS][CHUNK];
    __shared__ float key_row[LANES * 8];
    constexpr int SUMMED = HEADS * LANES <= 64 ? HEADS : 64 / LANES;  // heads whose outputs the warps add up at a time
    __shared__ float by_warp[WARPS][SUMMED][LANES * 8];
    __shared__ float maxima[HEADS], sums[HEADS], shrinks[HEADS];
    __shared__ int is_last;
    const Heads &h = a.h;
    const Cache &c = h.cache;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, sub = lane % LANES, row = warp * ROWS + lane / LANES;
    int kv = blockIdx.y, group = h.n_head / c.n_head_kv, first = blockIdx.z * HEADS;
    int heads = min(HEADS, group - first), head0 = kv * group + first;
    int n_splits = gridDim.x, n = *h.past + 1;
    int share = share_of(n, n_splits, STEP);
    int begin = min(n, int(blockIdx.x) * share), end = min(n, begin + share);
    bool has_newest = begin < end && end == n;

    // Rows begin + row, + STEP ... up to `limit`.
    Eight keys[BATCH], values[BATCH];
    auto read_keys = [&](int begin, int limit) {
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int p = begin + row + k * STEP;
            if (p < limit) keys[k].read(c.key(p, kv), c.key_scale(p, kv), sub, c.d);
        }
    };
    auto read_values = [&](int begin, int limit) {
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int p = begin + row + k * STEP;
            if (p < limit) values[k].read(c.value(p, kv), c.value_scale(p, kv), sub, c.d_v);
        }
    };

    let_successor_start();
    // What need not wait: the number of tokens changes between steps only, and all rows but the newest were there before.
    int known = min(end, n - 1);
    read_keys(begin, known);
    read_values(begin, known);
    prefetch_rows(c, kv, min(known, begin + BATCH * STEP), min(known, begin + CHUNK));
    Head<A_LANE> query, key;
    if (a.fused && warp < heads) query.read_norm(h, h.q_norm);
    if (a.fused && has_newest && warp == WARPS - 1) key.read_norm(h, h.k_norm);
    wait_for_predecessor();

    if (warp < HEADS) {  // a warp a head
        for (int i = lane; i < LANES * 8; i += WARP) queries[warp][i] = 0.0f;
        __syncwarp();
        if (warp < heads) {
            const float *q = h.q + (head0 + warp) * c.d;
            if (a.fused) {
                query.read(h, q, 0);
                query.finish(h, queries[warp], h.q_norm);
            } else {
                for (int i = lane; i < c.d; i += WARP) queries[warp][i] = q[i];
            }
        }
    }
    if (a.fused && has_newest) {
        if (warp == WARPS - 1) store_key(key, h, key_row, 0, kv);
        if (warp == WARPS - 2) store_value(h, 0, kv);
    }
    if (threadIdx.x < HEADS) {
        maxima[threadIdx.x] = -CUDART_INF_F;
        sums[threadIdx.x] = 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BATCH; k++)
        if (begin + row + k * STEP == n - 1 && has_newest) {
            keys[k].read(c.key(n - 1, kv), c.key_scale(n - 1, kv), sub, c.d);
            values[k].read(c.value(n - 1, kv), c.value_scale(n - 1, kv), sub, c.d_v);
        }
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
        for (int batch = start; batch < stop; batch += BATCH * STEP) {
            Eight now[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) now[k] = keys[k];
            read_keys(batch + BATCH * STEP, end);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (batch + k * STEP >= stop) break;
                int p = batch + row + k * STEP;
                float x[8];
                now[k].unpack(x);
#pragma unroll
                for (int g = 0; g < HEADS; g++) {
                    float s = 0.0f;
#pragma unroll
                    for (int i = 0; i < 8; i++) s += q[g][i] * x[i];
#pragma unroll
                    for (int lanes = LANES / 2; lanes; lanes /= 2) s += __shfl_xor_sync(~0u, s, lanes);
                    if (sub == 0 && p < stop) scores[g][p - start] = s * now[k].scale;
                }
            }
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
        for (int batch = start; batch < stop; batch += BATCH * STEP) {
            Eight now[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) now[k] = values[k];
            read_values(batch + BATCH * STEP, end);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                int p = batch + row + k * STEP;
                if (p >= stop) break;
                float x[8];
                now[k].unpack(x);
#pragma unroll
                for (int g = 0; g < HEADS; g++)
                    if (g < heads) {
                        float weight = scores[g][p - start] * now[k].scale;
#pragma unroll
                        for (int i = 0; i < 8; i++) mixed[g][i] += weight * x[i];
                    }
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
#pragma unroll 8
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
    extern "C" __global__ void __launch_bounds__(THREADS, HEADS < 8 ? 2 : 1) attention_decode_##LANES##_##HEADS(                         \
        const __grid_constant__ Decode a) {                                                                              \
        attend<LANES, HEADS>(a);                                                                                         \
    }
#define ATTENTIONS(LANES) ATTENTION(LANES, 1) ATTENTION(LANES, 2) ATTENTION(LANES, 4) ATTENTION(LANES, 8)
