// Multi-head latent attention in absorbed form, over one cached row a token that all heads share: its first `rank` numbers
// are both key and value, the others key alone.
//
//     out[t][h] = sum over the positions s that t sees of softmax(scale * (absorbed[t][h] . c_s + q_rope[t][h] . k_s)) c_s
#include <math_constants.h>

#include "cache.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int AT_ONCE = 4;   // positions whose keys a warp asks for together
constexpr int PAIRS = 2;     // of outputs a thread: rank <= 2 * PAIRS * THREADS
constexpr int TILE = 8;      // tokens that share what is read of a key matrix
constexpr int SLICE = 64;    // of its rows at a time
constexpr float LOG2_E = 1.4426950408889634f;

// x (T, width) into the cache behind `past`. One warp a token, one block.
extern "C" __global__ void store_latent(const __grid_constant__ Cache cache, const float *x, const int *past) {
    let_successor_start();
    wait_for_predecessor();
    int position = *past + blockIdx.x;
    store_row(cache.key(position, 0), cache.key_scale(position, 0), x + blockIdx.x * (int64_t)cache.d, cache.d);
}

struct Absorb {
    float *out;        // (T, n_head, rank)
    const float *q;    // (T, n_head, d_q): the first d_nope of each head count
    const float *k_b;  // (n_head, d_nope, rank)
    int n_tokens, n_head, rank, d_nope, d_q;
    int unused;
};

// out[t][h] = sum over d of q[t][h][d] k_b[h][d]: for files that have keys' rows, not their columns, side by side. A
// thread a column, its sums in order. Grid (rank over threads, n_head, T over TILE).
extern "C" __global__ void absorb(const __grid_constant__ Absorb a) {
    __shared__ float query[SLICE][TILE];
    let_successor_start();
    wait_for_predecessor();
    int column = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y, first = blockIdx.z * TILE;
    const float *k_b = a.k_b + head * (int64_t)a.d_nope * a.rank + column;
    float sum[TILE] = {};
    for (int start = 0; start < a.d_nope; start += SLICE) {
        int n = min(SLICE, a.d_nope - start);
        __syncthreads();
        for (int i = threadIdx.x; i < n * TILE; i += blockDim.x) {
            int d = i % n, t = i / n, token = min(first + t, a.n_tokens - 1);  // those beyond are not written
            query[d][t] = a.q[(token * (int64_t)a.n_head + head) * a.d_q + start + d];
        }
        __syncthreads();
        if (column >= a.rank) continue;
#pragma unroll 16
        for (int d = 0; d < n; d++) {
            float weight = k_b[(start + d) * (int64_t)a.rank];
#pragma unroll
            for (int t = 0; t < TILE; t++) sum[t] += query[d][t] * weight;
        }
    }
    if (column >= a.rank) return;
#pragma unroll
    for (int t = 0; t < TILE; t++)
        if (first + t < a.n_tokens) a.out[((first + t) * (int64_t)a.n_head + head) * a.rank + column] = sum[t];
}

struct Latent {
    float *out;             // (T, n_head, rank)
    const float *absorbed;  // (T, n_head, rank)
    const float *q;         // (T, n_head, d_q): the last d - rank of each head are q_rope
    const uint32_t *mask;   // as in attention_prefill.cu
    const int *past;
    Cache cache;     // n_head_kv = 1, d = rank + d_rope
    float *partial;  // (n_head, n_splits, rank + 2): mixed, and what they were made with: largest score, sum of weights
    int *tickets;    // (n_head), zeros before and after
    int n_tokens, n_head, rank, d_q;
    float scale;
    int unused;
};

// Adds up each of a warp's N values, a power of two: lane l gets the sum of value l / (WARP / N). Half of what is left is
// given away in every step, so that N values take no more exchanges than N.
template <int N>
__device__ __forceinline__ float shared_sums(float (&x)[N]) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = N / 2, lanes = WARP / 2; n; n /= 2, lanes /= 2)
#pragma unroll
        for (int k = 0; k < n; k++) {
            float given = __shfl_xor_sync(~0u, lane & lanes ? x[k] : x[k + n], lanes);
            x[k] = (lane & lanes ? x[k + n] : x[k]) + given;
        }
#pragma unroll
    for (int lanes = WARP / N / 2; lanes; lanes /= 2) x[0] += __shfl_xor_sync(~0u, x[0], lanes);
    return x[0];
}

// Grid (ceil(n_head / HEADS), T, n_splits), THREADS threads; shared: HEADS * d floats. HEADS heads share what a block reads
// of latents. The positions of one token are shared out among n_splits blocks, and the last one puts them together,
// always in the same order.
template <int HEADS>
__device__ __forceinline__ void attend(const Latent &a) {
    static_assert(HEADS <= WARPS);
    extern __shared__ int4 memory[];
    __shared__ float scores[PAGE][HEADS], shrinks[HEADS], inverses[HEADS];
    float *query = (float *)memory;  // (d, HEADS)
    let_successor_start();
    wait_for_predecessor();
    int first_head = blockIdx.x * HEADS, n_heads = min(HEADS, a.n_head - first_head), token = blockIdx.y;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, d = a.cache.d;
    int past = *a.past, end = past + token + 1;
    int64_t row = token * (int64_t)a.n_head + first_head;
#pragma unroll 2
    for (int i = threadIdx.x; i < d * HEADS; i += THREADS) {
        int64_t own = row + min(i % HEADS, n_heads - 1);  // those beyond are not written
        int column = i / HEADS;
        query[i] = (column < a.rank ? a.absorbed[own * a.rank + column] : a.q[own * a.d_q + a.d_q - d + column]) *
                   (a.scale * LOG2_E);
    }
    const uint32_t *mask = a.mask ? a.mask + token * (int64_t)(1 + (a.n_tokens + 31) / 32) : nullptr;
    float mixed[PAIRS][2][HEADS] = {}, largest = -CUDART_INF_F, sum = 0.0f;  // the last two of head `warp`
    int share = (end + gridDim.z - 1) / gridDim.z, from = blockIdx.z * share, until = min(end, from + share);
    for (int start = from, stop; start < until; start = stop) {
        stop = min(until, (start / PAGE + 1) * PAGE);
        const half *keys = a.cache.key(start, 0);
        const float *scales = a.cache.key_scale(start, 0);
        int n = stop - start;
        __syncthreads();
        if (mask) {  // pages of a tree that the token does not see are not read: of a large one that is most of them
            int word = max(start - past, 0) / 32 + threadIdx.x;
            bool sees = start < past && mask[0];
            if (threadIdx.x <= PAGE / 32 && 32 * word < stop - past) sees |= mask[1 + word] != 0;
            if (!__syncthreads_or(sees)) continue;
        }
        for (int first = warp * AT_ONCE; first < n; first += WARPS * AT_ONCE) {
            float score[AT_ONCE * HEADS] = {};
#pragma unroll 2
            for (int i = lane; i < d; i += WARP) {
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    float key = __half2float(keys[min(first + j, n - 1) * d + i]);
#pragma unroll
                    for (int h = 0; h < HEADS; h++) score[j * HEADS + h] += query[i * HEADS + h] * key;
                }
            }
            float own = shared_sums(score);
            constexpr int LANES = WARP / (AT_ONCE * HEADS);
            int p = first + lane / LANES / HEADS, in_step = start + p - past;
            if (lane % LANES || p >= n) continue;
            own *= scales[p];
            if (mask && !(in_step < 0 ? mask[0] : mask[1 + in_step / 32] >> in_step % 32 & 1)) own = -CUDART_INF_F;
            scores[p][lane / LANES % HEADS] = own;
        }
        __syncthreads();
        if (warp < HEADS) {
            float peak = largest;
#pragma unroll 1
            for (int p = lane; p < n; p += WARP) peak = fmaxf(peak, scores[p][warp]);
            peak = warp_max(peak);
            float reference = peak == -CUDART_INF_F ? 0.0f : peak, shrink = exp2f(largest - reference), more = 0.0f;
#pragma unroll 2
            for (int p = lane; p < n; p += WARP) {
                float weight = exp2f(scores[p][warp] - reference);
                more += weight;
                scores[p][warp] = weight * scales[p];
            }
            sum = sum * shrink + warp_sum(more);
            largest = peak;
            if (lane == 0) shrinks[warp] = shrink;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            int i = 2 * (threadIdx.x + k * THREADS);
            if (i >= a.rank) break;
#pragma unroll
            for (int h = 0; h < HEADS; h++) mixed[k][0][h] *= shrinks[h], mixed[k][1][h] *= shrinks[h];
#pragma unroll 4
            for (int p = 0; p < n; p++) {
                float2 value = __half22float2(*(const half2 *)(keys + p * d + i));
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    mixed[k][0][h] += scores[p][h] * value.x;
                    mixed[k][1][h] += scores[p][h] * value.y;
                }
            }
        }
    }
    int n_splits = gridDim.z, width = a.rank + 2;
    if (n_splits > 1) {
        float *partial = a.partial + first_head * (int64_t)n_splits * width;  // (heads, n_splits, width)
        float *own = partial + blockIdx.z * width;
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            int i = 2 * (threadIdx.x + k * THREADS);
            if (i >= a.rank) break;
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                if (h < n_heads)
                    *(float2 *)(own + h * n_splits * width + i) = make_float2(mixed[k][0][h], mixed[k][1][h]);
        }
        if (warp < n_heads && lane == 0) {
            float *end_of = own + warp * n_splits * width + a.rank;
            end_of[0] = largest, end_of[1] = sum;
        }
        __shared__ bool is_last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(a.tickets + blockIdx.x, 1) == n_splits - 1;
            if (is_last) a.tickets[blockIdx.x] = 0;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
#pragma unroll 1
        for (int h = 0; h < n_heads; h++) {
            const float *others = partial + h * n_splits * width;
            float most = -CUDART_INF_F, all = 0.0f, put_together[PAIRS][2] = {};
#pragma unroll 2
            for (int s = 0; s < n_splits; s++) most = fmaxf(most, __ldcg(others + s * width + a.rank));
#pragma unroll 4
            for (int s = 0; s < n_splits; s++) {
                const float *other = others + s * width;
                float count = exp2f(__ldcg(other + a.rank) - most);  // 0 of a block without positions
                all += __ldcg(other + a.rank + 1) * count;
#pragma unroll
                for (int k = 0; k < PAIRS; k++) {
                    int i = 2 * (threadIdx.x + k * THREADS);
                    if (i >= a.rank) break;
                    float2 part = __ldcg((const float2 *)(other + i));
                    put_together[k][0] += part.x * count, put_together[k][1] += part.y * count;
                }
            }
            float inverse = 1.0f / all;
#pragma unroll
            for (int k = 0; k < PAIRS; k++) {
                int i = 2 * (threadIdx.x + k * THREADS);
                float *to = a.out + (row + h) * a.rank + i;
                if (i < a.rank) *(float2 *)to = make_float2(put_together[k][0] * inverse, put_together[k][1] * inverse);
            }
        }
        return;
    }
    if (warp < HEADS && lane == 0) inverses[warp] = 1.0f / sum;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PAIRS; k++) {
        int i = 2 * (threadIdx.x + k * THREADS);
        if (i >= a.rank) break;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float *to = a.out + (row + h) * a.rank + i;
            if (h < n_heads) *(float2 *)to = make_float2(mixed[k][0][h] * inverses[h], mixed[k][1][h] * inverses[h]);
        }
    }
}

#define LATENT(HEADS)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_latent_##HEADS(const __grid_constant__ Latent a) {\
        attend<HEADS>(a);                                                                                                \
    }

LATENT(1)
LATENT(4)
