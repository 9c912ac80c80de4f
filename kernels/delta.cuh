// The gated delta rule, a state S (d_k, d_v) a value head, token after token:
//     S = exp(softplus(alpha + dt) decay) S;  S += k (sigmoid(beta) (v - S^T k))^T;  out = scale S^T q
//
// AT_ONCE tokens are one step. With d_i the decay, b_i = sigmoid(beta) and S the state before all of them, behind token i
//     S_i = c_i S + sum over j <= i of k_j w_ij^T,  c_i = d_1 .. d_i,  w_ii = b_i (v_i - d_i S_(i-1)^T k_i),  w_ij = d_i w_(i-1)j
// so that all sums over rows, S^T k_i and S^T q_i, are of the state before, and what comes of them needs products of keys
// and queries only. No decay is divided by. A tree takes one token a step.
//
// A thread keeps 16 rows of a column in registers; the D_K / 16 threads of a column lie side by side in a warp. Tokens
// are fetched 16 at a time while those before them are worked on. Grid (n_head_v, d_v / (2048 / D_K)), 4 warps; d_k and
// d_v are multiples of 4.
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
    void *chunks;                 // room of delta_chunks.cuh
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

// The sum over so many lanes side by side, the same in each.
template <int LANES>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

template <int D_K, int AT_ONCE>
struct Tokens {  // a fetch of tokens in shared memory
    static constexpr int COUNT = 16, LANES = D_K / 16, COLUMNS = DELTA_THREADS / LANES;
    float4 keys[COUNT][D_K / 4], queries[COUNT][D_K / 4];
    float4 values[COUNT][COLUMNS / 4];
    float2 gates[COUNT];               // decay and sigmoid(beta)
    float products[COUNT][AT_ONCE];    // of the tokens of a step: q_i k_j at [i][j] for j <= i, k_i k_j at [j][i] for j < i

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

    // Begin to fetch the tokens from `first` on. Returns alpha and beta of this thread's token, on their way, too. Beyond
    // the last token values are zero.
    __device__ __forceinline__ float2 fill(const Delta &a, int first, int from, int head) {
        int n = min(COUNT, a.s.n_tokens - first), column = blockIdx.y * COLUMNS;
        int64_t key = first * (int64_t)a.key_stride + from * a.d_k;
        fetch_rows(keys[0], a.k + key, a.key_stride, a.d_k, D_K / 4, n);
        fetch_rows(queries[0], a.q + key, a.key_stride, a.d_k, D_K / 4, n);
        fetch_rows(values[0], a.v + first * (int64_t)a.value_stride + head * a.d_v + column, a.value_stride, a.d_v - column,
                   COLUMNS / 4, n);
        for (int i = n * (COLUMNS / 4) + threadIdx.x; i < COUNT * (COLUMNS / 4); i += DELTA_THREADS)
            values[0][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (threadIdx.x >= n) return make_float2(0.0f, 0.0f);
        int64_t row = (first + threadIdx.x) * (int64_t)a.n_head_v + head;
        return make_float2(a.alpha[row], a.beta[row]);
    }

    // A token beyond the n there are leaves the state as it is.
    __device__ __forceinline__ void open(float2 alpha_beta, float dt, float rate, int n) {
        if (threadIdx.x < COUNT)
            gates[threadIdx.x] = threadIdx.x < n ? ::gates(alpha_beta.x, alpha_beta.y, dt, rate) : make_float2(1.0f, 0.0f);
    }

    // Once all are there: SHARE threads a product, beginning at different columns for the sake of the banks.
    __device__ __forceinline__ void multiply() {
        constexpr int SHARE = DELTA_THREADS / (COUNT * AT_ONCE), STEPS = D_K / 4 / SHARE;
        int product = threadIdx.x / SHARE, row = product / AT_ONCE, i = row % AT_ONCE, j = product % AT_ONCE;
        const float4 *one = j <= i ? queries[row] : keys[row], *other = keys[row - i + j];
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            int at = (step + j) % STEPS * SHARE + threadIdx.x % SHARE;
            float4 x = one[at], y = other[at];
            sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
        sum = sum_of_lanes<SHARE>(sum);
        if (threadIdx.x % SHARE == 0) products[row][j] = sum;
    }
};

template <int D_K, int AT_ONCE, bool IS_TREE>
__device__ __forceinline__ void delta_rule(const Delta &a) {
    using Fetch = Tokens<D_K, AT_ONCE>;
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
    let_successor_start();
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
    int64_t stride = a.n_head_v * (int64_t)a.d_v;
    for (int first = 0; first < n_tokens; first += COUNT) {
        Fetch &f = fetches[first / COUNT % 2];
        int n = min(COUNT, n_tokens - first);
        f.open(alpha_beta, dt, rate, n);
        wait_for_fetched();
        __syncthreads();
        f.multiply();
        if (first + COUNT < n_tokens)
            alpha_beta = fetches[1 - first / COUNT % 2].fill(a, first + COUNT, from, head);
        __syncthreads();
        for (int begin = 0; begin < n; begin += AT_ONCE) {
            if (IS_TREE) {
                int token = first + begin, parent = a.s.parent(token);
                if (parent < 0)
                    load(parent == -1 ? a.s.before() : nullptr);
                else if (parent != token - 1)
                    load(a.branches + parent * size);
            }
            float remembered[AT_ONCE] = {}, results[AT_ONCE] = {}, written[AT_ONCE], left = 1.0f;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    float4 key = f.keys[begin + i][part + LANES * j], query = f.queries[begin + i][part + LANES * j];
                    float &memory = remembered[i], &seen = results[i];
                    memory += state[j].x * key.x, seen += state[j].x * query.x;
                    memory += state[j].y * key.y, seen += state[j].y * query.y;
                    memory += state[j].z * key.z, seen += state[j].z * query.z;
                    memory += state[j].w * key.w, seen += state[j].w * query.w;
                }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                remembered[i] = sum_of_lanes<LANES>(remembered[i]);
                results[i] = sum_of_lanes<LANES>(results[i]);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                float2 gate = f.gates[begin + i];
                left *= gate.x;
                float memory = left * remembered[i];
                results[i] *= left;
#pragma unroll
                for (int j = 0; j < i; j++) {
                    written[j] *= gate.x;
                    memory += written[j] * f.products[begin + j][i];
                    results[i] += written[j] * f.products[begin + i][j];
                }
                written[i] = gate.y * (((const float *)f.values[begin + i])[column_here] - memory);
                results[i] += written[i] * f.products[begin + i][i];
            }
            // All threads of a column have all results; each writes those of its tokens.
#pragma unroll
            for (int i = 0; i < AT_ONCE; i += LANES) {
                float result = results[i];
#pragma unroll
                for (int j = 1; j < LANES && i + j < AT_ONCE; j++) result = part == j ? results[i + j] : result;
                int token = begin + i + part;
                if (there && i + part < AT_ONCE && token < n) out[token * stride] = a.scale * result;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float4 s = state[j];
                s.x *= left, s.y *= left, s.z *= left, s.w *= left;
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    float4 key = f.keys[begin + i][part + LANES * j];
                    s.x += key.x * written[i], s.y += key.y * written[i];
                    s.z += key.z * written[i], s.w += key.w * written[i];
                }
                state[j] = s;
            }
            if (IS_TREE) {
                store(a.branches + (first + begin) * size);
                if (first + begin == kept - 1) store(a.s.after());
            }
        }
        out += COUNT * stride;
    }
    if (!IS_TREE && kept) store(a.s.after());
}
