// Multi-head latent attention in absorbed form, over one cached row a token that all heads share: its first `rank` numbers
// are both key and value, the others key alone.
//
//     out[t][h] = sum over the positions s that t sees of softmax(scale * (absorbed[t][h] . c_s + q_rope[t][h] . k_s)) c_s
#include <math_constants.h>

#include "cache.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int CHUNK = 256;
constexpr int AT_ONCE = 4;   // positions whose keys a warp asks for together
constexpr int A_THREAD = 4;  // outputs: rank <= A_THREAD * THREADS
constexpr int TILE = 8;      // tokens that share what is read of a key matrix
constexpr int SLICE = 64;    // of its rows at a time
constexpr float LOG2_E = 1.4426950408889634f;

// x (T, width) into the cache behind `past`. One warp a token, one block.
extern "C" __global__ void store_latent(const __grid_constant__ Cache cache, const float *x, const int *past) {
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

// Grid (n_head, T, n_splits), THREADS threads; shared: d floats. The positions of one token are shared out among n_splits
// blocks, and the last one puts them together, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS) attention_latent(const __grid_constant__ Latent a) {
    extern __shared__ int4 memory[];
    __shared__ float scores[CHUNK], room[WARP];
    float *query = (float *)memory;
    wait_for_predecessor();
    int head = blockIdx.x, token = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, d = a.cache.d;
    int past = *a.past, end = past + token + 1;
    int64_t row = token * (int64_t)a.n_head + head;
    for (int i = threadIdx.x; i < d; i += THREADS)
        query[i] = (i < a.rank ? a.absorbed[row * a.rank + i] : a.q[row * a.d_q + a.d_q - d + i]) * (a.scale * LOG2_E);
    const uint32_t *mask = a.mask ? a.mask + token * (int64_t)(1 + (a.n_tokens + 31) / 32) : nullptr;
    float mixed[A_THREAD] = {}, largest = -CUDART_INF_F, sum = 0.0f;
    int share = (end + gridDim.z - 1) / gridDim.z, from = blockIdx.z * share, until = min(end, from + share);
    for (int start = from; start < until; start += CHUNK) {
        int stop = min(until, start + CHUNK);
        __syncthreads();
        if (mask) {  // chunks of a tree that the token does not see are not read: of a large one that is most of them
            int word = max(start - past, 0) / 32 + threadIdx.x;
            bool sees = start < past && mask[0];
            if (threadIdx.x <= CHUNK / 32 && 32 * word < stop - past) sees |= mask[1 + word] != 0;
            if (!__syncthreads_or(sees)) continue;
        }
        for (int first = start + warp * AT_ONCE; first < stop; first += WARPS * AT_ONCE) {
            const half *keys[AT_ONCE];
            float score[AT_ONCE] = {};
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) keys[j] = a.cache.key(min(first + j, stop - 1), 0);
#pragma unroll 2
            for (int i = lane; i < d; i += WARP) {
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) score[j] += query[i] * __half2float(keys[j][i]);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                int p = first + j, own = p - past;
                score[j] = warp_sum(score[j]);
                if (p >= stop) continue;
                score[j] *= *a.cache.key_scale(p, 0);
                if (mask && !(own < 0 ? mask[0] : mask[1 + own / 32] >> own % 32 & 1)) score[j] = -CUDART_INF_F;
                if (lane == 0) scores[p - start] = score[j];
            }
        }
        __syncthreads();
        float score = threadIdx.x < stop - start ? scores[threadIdx.x] : -CUDART_INF_F;
        float peak = fmaxf(largest, block_max(score, room));
        float reference = peak == -CUDART_INF_F ? 0.0f : peak, shrink = exp2f(largest - reference);
        float weight = exp2f(score - reference);
        __syncthreads();
        if (threadIdx.x < stop - start) scores[threadIdx.x] = weight * *a.cache.key_scale(start + threadIdx.x, 0);
        sum = sum * shrink + block_sum(weight, room);
        largest = peak;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < A_THREAD; k++) {
            int i = threadIdx.x + k * THREADS;
            if (i >= a.rank) break;
            float value = mixed[k] * shrink;
#pragma unroll 4
            for (int p = start; p < stop; p++) value += scores[p - start] * __half2float(a.cache.key(p, 0)[i]);
            mixed[k] = value;
        }
    }
    int n_splits = gridDim.z, width = a.rank + 2;
    if (n_splits > 1) {
        float *partial = a.partial + head * n_splits * width, *own = partial + blockIdx.z * width;
#pragma unroll
        for (int k = 0; k < A_THREAD; k++) {
            int i = threadIdx.x + k * THREADS;
            if (i < a.rank) own[i] = mixed[k];
        }
        if (threadIdx.x == 0) own[a.rank] = largest, own[a.rank + 1] = sum;
        __shared__ bool is_last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(a.tickets + head, 1) == n_splits - 1;
            if (is_last) a.tickets[head] = 0;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        largest = -CUDART_INF_F, sum = 0.0f;
        for (int s = 0; s < n_splits; s++) largest = fmaxf(largest, __ldcg(partial + s * width + a.rank));
#pragma unroll
        for (int k = 0; k < A_THREAD; k++) mixed[k] = 0.0f;
#pragma unroll 4
        for (int s = 0; s < n_splits; s++) {
            const float *other = partial + s * width;
            float count = exp2f(__ldcg(other + a.rank) - largest);  // 0 of a block without positions
            sum += __ldcg(other + a.rank + 1) * count;
#pragma unroll
            for (int k = 0; k < A_THREAD; k++) {
                int i = threadIdx.x + k * THREADS;
                if (i < a.rank) mixed[k] += __ldcg(other + i) * count;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < A_THREAD; k++) {
        int i = threadIdx.x + k * THREADS;
        if (i < a.rank) a.out[row * a.rank + i] = mixed[k] / sum;
    }
}
