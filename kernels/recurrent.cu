// What delta-net layers keep: the last inputs of a convolution, and one matrix a head. Both are held twice, so that a step
// can be taken back: a step reads the state of the parity in `control` and leaves that of its kept tokens in the other.
//
// parents (T): the token before each within the step, -1 for the state, -2 for nothing; null for a plain text.
#include "block.cuh"

struct Step {
    const int *control;  // past, kept tokens, serial, parity
    const int *parents;
    float *states[2];
    int n_tokens, unused;

    __device__ __forceinline__ int kept() const { return control[1]; }
    __device__ __forceinline__ int parent(int token) const { return parents ? parents[token] : token - 1; }
    __device__ __forceinline__ const float *before() const { return states[control[3]]; }
    __device__ __forceinline__ float *after() const { return states[1 - control[3]]; }
};

// out (T, width) = silu of a causal depthwise convolution of x (T, width) with taps (width, kernel), the last tap for the
// token itself. The state is the last kernel - 1 inputs, oldest first. A thread a channel; grid (channels, T).
extern "C" __global__ void conv(const __grid_constant__ Step s, float *out, const float *x, const float *taps, int width,
                                int kernel) {
    wait_for_predecessor();
    int channel = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y, kept = s.kept();
    if (channel >= width) return;
    const float *tail = s.before();
    float sum = 0.0f;
    int at = token, behind = 0;  // once the step's own tokens are used up: how many of the state's
    for (int tap = kernel - 1; tap >= 0; tap--) {
        float input = 0.0f;
        if (at >= 0) {
            input = x[at * (int64_t)width + channel];
            at = s.parent(at);
        } else if (at == -1) {
            input = tail[(kernel - 2 - behind) * (int64_t)width + channel];
            behind++;
        }
        sum += input * taps[channel * kernel + tap];
    }
    out[token * (int64_t)width + channel] = sum * sigmoid(sum);
    if (token == 0 && kept)
        for (int row = 0; row < kernel - 1; row++) {
            int from = row + kept;
            s.after()[row * (int64_t)width + channel] =
                from < kernel - 1 ? tail[from * (int64_t)width + channel] : x[(from - kernel + 1) * (int64_t)width + channel];
        }
}

struct Delta {
    Step s;
    float *out;                   // (T, n_head_v * d_v)
    const float *q, *k, *v;       // (T, n_head_k * d_k) twice, (T, n_head_v * d_v)
    const float *alpha, *beta;    // (T, n_head_v)
    const float *dt, *decay;      // (n_head_v)
    float *branches;              // (T, n_head_v, d_k, d_v): the state behind every token of a tree
    int n_head_k, n_head_v, d_k, d_v, tiled;
    float scale;
};

// The gated delta rule, token after token, a state S (d_k, d_v) a value head:
//     S = exp(softplus(alpha + dt) decay) S;  S += k (sigmoid(beta) (v - S^T k))^T;  out = scale S^T q
// A thread keeps half a column of S in registers; grid (n_head_v, d_v / 16), one warp a block.
template <int D_K>
__device__ __forceinline__ void delta_rule(const Delta &a) {
    __shared__ float keys[D_K], queries[D_K];
    wait_for_predecessor();
    int head = blockIdx.x, column = blockIdx.y * 16 + threadIdx.x % 16, kept = a.s.kept();
    int from = a.tiled ? head % a.n_head_k : head / (a.n_head_v / a.n_head_k);
    bool there = column < a.d_v;
    constexpr int ROWS = D_K / 2;
    int first = threadIdx.x / 16 * ROWS;
    int64_t place = (head * (int64_t)a.d_k + first) * a.d_v + column, size = (int64_t)a.n_head_v * a.d_k * a.d_v;
    float state[ROWS];
    auto load = [&](const float *states) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) state[i] = states && there && first + i < a.d_k ? states[place + i * (int64_t)a.d_v] : 0.0f;
    };
    auto store = [&](float *states) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (there && first + i < a.d_k) states[place + i * (int64_t)a.d_v] = state[i];
    };
    for (int token = 0; token < a.s.n_tokens; token++) {
        int parent = a.s.parent(token);
        if (parent < 0)
            load(parent == -1 ? a.s.before() : nullptr);
        else if (parent != token - 1)
            load(a.branches + parent * size);
        __syncwarp();
        for (int i = threadIdx.x; i < D_K; i += WARP) {
            int64_t at = (token * (int64_t)a.n_head_k + from) * a.d_k + i;
            keys[i] = i < a.d_k ? a.k[at] : 0.0f;
            queries[i] = i < a.d_k ? a.q[at] * a.scale : 0.0f;
        }
        __syncwarp();
        int64_t row = token * (int64_t)a.n_head_v + head;
        float x = a.alpha[row] + a.dt[head];
        float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
        float decay = expf(softplus * a.decay[head]), memory = 0.0f, out = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            state[i] *= decay;
            memory += state[i] * keys[first + i];
        }
        memory += __shfl_xor_sync(~0u, memory, 16);
        float change = there ? sigmoid(a.beta[row]) * (a.v[row * a.d_v + column] - memory) : 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            state[i] += keys[first + i] * change;
            out += state[i] * queries[first + i];
        }
        out += __shfl_xor_sync(~0u, out, 16);
        if (there && first == 0) a.out[row * a.d_v + column] = out;
        if (a.s.parents) store(a.branches + token * size);
        if (token == kept - 1) store(a.s.after());
    }
}

#define DELTA(D_K)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(WARP, 1) delta_rule_##D_K(const __grid_constant__ Delta a) {            \
        delta_rule<D_K>(a);                                                                                              \
    }

DELTA(32)
DELTA(64)
DELTA(128)
