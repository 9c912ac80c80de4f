// The gated delta rule, token after token, a state S (d_k, d_v) a value head:
//     S = exp(softplus(alpha + dt) decay) S;  S += k (sigmoid(beta) (v - S^T k))^T;  out = scale S^T q
//
// As S^T q = decay (S_before^T q) + (k q) change, both products read the state before the token: what one token waits for
// of the one before is one sum over the rows of a column and the change of its numbers. A thread keeps 16 rows of a
// column in registers; the D_K / 16 threads of a column lie side by side in a warp. Tokens are fetched 16 at a time while
// those before them are worked on. Grid (n_head_v, d_v / (4 * 512 / D_K)), 4 warps; d_k and d_v are multiples of 4.
#pragma once

#include "recurrent.cuh"

constexpr int LARGEST_HEAD = 128, DELTA_THREADS = 128;

struct Delta {
    Step s;
    float *out;                   // (T, n_head_v * d_v)
    const float *q, *k, *v;       // (T) rows of n_head_k * d_k numbers twice, of n_head_v * d_v
    const float *alpha, *beta;    // (T, n_head_v)
    const float *dt, *decay;      // (n_head_v)
    float *branches;              // (T, n_head_v, d_k, d_v): the state behind every token of a tree
    int n_head_k, n_head_v, d_k, d_v, tiled;
    int key_stride, value_stride;  // between rows of q and k, and of v
    float scale;
};

// 16 bytes on their way to shared memory, or there at once where copies cannot be asynchronous.
__device__ __forceinline__ void fetch(float *to, const float *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#else
    *(float4 *)to = *(const float4 *)from;
#endif
}

// What this thread has fetched is there; others see it after the next barrier.
__device__ __forceinline__ void wait_for_fetched() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <int D_K>
struct Tokens {  // a fetch of tokens in shared memory
    static constexpr int COUNT = 16, LANES = D_K / 16, COLUMNS = DELTA_THREADS / LANES;
    float4 keys[COUNT][D_K / 4], queries[COUNT][D_K / 4];
    float4 values[COUNT][COLUMNS / 4];
    float4 gates[COUNT];  // decay, beta, key times query

    // Begin to fetch `count` rows of `length` numbers, which lie `stride` apart, into rows of `pieces` times 4. What is
    // beyond is left as it is.
    static __device__ __forceinline__ void fetch_rows(float4 *to, const float *from, int stride, int length, int pieces,
                                                      int count) {
        int row = threadIdx.x / pieces, at = threadIdx.x % pieces, step = DELTA_THREADS / pieces;
        if (4 * at >= length) return;
        from += row * (int64_t)stride + 4 * at;
        to += row * pieces + at;
        for (; row < count; row += step, from += step * (int64_t)stride, to += step * pieces) fetch((float *)to, from);
    }

    // Begin to fetch the tokens from `first` on. Returns alpha and beta of this thread's token, on their way, too.
    __device__ __forceinline__ float2 fill(const Delta &a, int first, int from, int head) {
        int n = min(COUNT, a.s.n_tokens - first), column = blockIdx.y * COLUMNS;
        int64_t key = first * (int64_t)a.key_stride + from * a.d_k;
        fetch_rows(keys[0], a.k + key, a.key_stride, a.d_k, D_K / 4, n);
        fetch_rows(queries[0], a.q + key, a.key_stride, a.d_k, D_K / 4, n);
        fetch_rows(values[0], a.v + first * (int64_t)a.value_stride + head * a.d_v + column, a.value_stride, a.d_v - column,
                   COLUMNS / 4, n);
        if (threadIdx.x >= n) return make_float2(0.0f, 0.0f);
        int64_t row = (first + threadIdx.x) * (int64_t)a.n_head_v + head;
        return make_float2(a.alpha[row], a.beta[row]);
    }

    __device__ __forceinline__ void open(float2 alpha_beta, float dt, float rate) {
        if (threadIdx.x >= COUNT) return;
        float2 gate = ::gates(alpha_beta.x, alpha_beta.y, dt, rate);
        gates[threadIdx.x].x = gate.x;
        gates[threadIdx.x].y = gate.y;
    }

    // Once all are there: a warp a token, a lane four numbers.
    __device__ __forceinline__ void multiply(int n) {
        int lane = threadIdx.x % WARP;
        for (int token = threadIdx.x / WARP; token < n; token += DELTA_THREADS / WARP) {
            float sum = 0.0f;
            if (lane < D_K / 4) {
                float4 key = keys[token][lane], query = queries[token][lane];
                sum = key.x * query.x + key.y * query.y + key.z * query.z + key.w * query.w;
            }
            sum = warp_sum(sum);
            if (lane == 0) gates[token].z = sum;
        }
    }
};

template <int LANES>
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

template <int D_K, bool IS_TREE>
__device__ __forceinline__ void delta_rule(const Delta &a) {
    using Fetch = Tokens<D_K>;
    constexpr int LANES = Fetch::LANES, COUNT = Fetch::COUNT;
    __shared__ Fetch fetches[2];
    int head = blockIdx.x, part = threadIdx.x % LANES, column_here = threadIdx.x / LANES;
    int column = blockIdx.y * Fetch::COLUMNS + column_here;
    int from = a.tiled ? head % a.n_head_k : head / (a.n_head_v / a.n_head_k), n_tokens = a.s.n_tokens;
    bool there = column < a.d_v;
    for (int i = threadIdx.x; i < 2 * COUNT * (D_K / 4); i += DELTA_THREADS) {
        Fetch &f = fetches[i / (COUNT * (D_K / 4))];
        int token = i / (D_K / 4) % COUNT, at = i % (D_K / 4);
        f.keys[token][at] = f.queries[token][at] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __syncthreads();
    wait_for_predecessor();
    float2 alpha_beta = fetches[0].fill(a, 0, from, head);
    float dt = a.dt[head], rate = a.decay[head];
    int kept = a.s.kept();

    // Rows 4 (part + LANES i) .. + 3 for i < 4: a warp reads each key in one piece.
    float4 state[4];
    int64_t size = (int64_t)a.n_head_v * a.d_k * a.d_v;
    auto row = [&](int i) { return 4 * (part + LANES * i); };
    auto place = [&](int i) { return (head * (int64_t)a.d_k + row(i)) * a.d_v + column; };
    auto load = [&](const float *states) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            state[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!states || !there || row(i) >= a.d_k) continue;
            const float *p = states + place(i);
            state[i] = make_float4(p[0], p[a.d_v], p[2 * a.d_v], p[3 * a.d_v]);
        }
    };
    auto store = [&](float *states) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!there || row(i) >= a.d_k) continue;
            float *p = states + place(i);
            p[0] = state[i].x, p[a.d_v] = state[i].y, p[2 * a.d_v] = state[i].z, p[3 * a.d_v] = state[i].w;
        }
    };
    if (!IS_TREE) load(a.s.before());
    float *out = a.out + head * (int64_t)a.d_v + column;
    bool writes = there && part == 0;
    for (int first = 0; first < n_tokens; first += COUNT) {
        Fetch &f = fetches[first / COUNT % 2];
        int n = min(COUNT, n_tokens - first);
        f.open(alpha_beta, dt, rate);
        wait_for_fetched();
        __syncthreads();
        f.multiply(n);
        if (first + COUNT < n_tokens)
            alpha_beta = fetches[1 - first / COUNT % 2].fill(a, first + COUNT, from, head);
        __syncthreads();
        float4 keys[4], queries[4];
        auto take = [&](int i) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                keys[j] = f.keys[i][part + LANES * j];
                queries[j] = f.queries[i][part + LANES * j];
            }
        };
        take(0);
#pragma unroll (IS_TREE ? 1 : 2)
        for (int i = 0; i < n; i++) {
            int token = first + i;
            if (IS_TREE) {
                int parent = a.s.parent(token);
                if (parent < 0)
                    load(parent == -1 ? a.s.before() : nullptr);
                else if (parent != token - 1)
                    load(a.branches + parent * size);
            }
            float4 memory = make_float4(0.0f, 0.0f, 0.0f, 0.0f), seen = memory, gate = f.gates[i], key[4];
            float value = ((const float *)f.values[i])[column_here];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float4 query = queries[j], s = state[j];
                key[j] = keys[j];
                memory.x += s.x * key[j].x, memory.y += s.y * key[j].y;
                memory.z += s.z * key[j].z, memory.w += s.w * key[j].w;
                seen.x += s.x * query.x, seen.y += s.y * query.y, seen.z += s.z * query.z, seen.w += s.w * query.w;
            }
            take(min(i + 1, COUNT - 1));  // while the sums are under way
            float remembered = column_sum<LANES>((memory.x + memory.y) + (memory.z + memory.w));
            float result = column_sum<LANES>((seen.x + seen.y) + (seen.z + seen.w));
            float decay = gate.x, change = gate.y * (value - decay * remembered);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float4 &s = state[j];
                s.x = decay * s.x + key[j].x * change, s.y = decay * s.y + key[j].y * change;
                s.z = decay * s.z + key[j].z * change, s.w = decay * s.w + key[j].w * change;
            }
            if (writes) *out = a.scale * (decay * result + gate.z * change);
            out += a.n_head_v * (int64_t)a.d_v;
            if (IS_TREE) {
                store(a.branches + token * size);
                if (token == kept - 1) store(a.s.after());
            }
        }
    }
    if (!IS_TREE && kept) store(a.s.after());
}
