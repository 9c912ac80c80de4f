// Delta-net layers: a short convolution, the gated delta rule, norm and gate. A token of decoding takes one kernel for
// all of it, other steps take three: conv_heads, the delta rule, norm_gate. `conv` is the convolution alone.
#include "delta_chunks.cuh"

// out (T, width): grid (channels, T), a thread a channel.
extern "C" __global__ void conv(const __grid_constant__ Step s, float *out, const float *x, const float *taps, int width,
                                int kernel) {
    let_successor_start();
    wait_for_predecessor();
    int channel = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (channel >= width) return;
    out[token * (int64_t)width + channel] = convolved(s, x, taps, width, kernel, token, channel);
    if (token == 0) keep_inputs(s, x, width, kernel, channel);
}

// The same by heads of d numbers, the first `normal` of which, queries and keys, end as x / sqrt(sum(x^2) + eps).
// A warp a head and token; grid (T / 8, heads), 8 warps, so that a block reads most rows once.
extern "C" __global__ void __launch_bounds__(256) conv_heads(const __grid_constant__ Step s, float *out, const float *x,
                                                             const float *taps, int width, int kernel, int d, int normal,
                                                             float eps) {
    let_successor_start();
    wait_for_predecessor();
    int lane = threadIdx.x % WARP, token = blockIdx.x * 8 + threadIdx.x / WARP, head = blockIdx.y;
    if (token >= s.n_tokens) return;
    float *row = out + token * (int64_t)width + head * d, sum = 0.0f;
    float values[LARGEST_HEAD / WARP];
#pragma unroll
    for (int i = 0; i < LARGEST_HEAD / WARP; i++) {
        int number = lane + WARP * i;
        values[i] = number < d ? convolved(s, x, taps, width, kernel, token, head * d + number) : 0.0f;
        sum += values[i] * values[i];
        if (token == 0 && number < d) keep_inputs(s, x, width, kernel, head * d + number);
    }
    sum = warp_sum(sum);
    float scale = head < normal ? 1.0f / sqrtf(sum + eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < LARGEST_HEAD / WARP; i++)
        if (lane + WARP * i < d) row[lane + WARP * i] = values[i] * scale;
}

// out = x / sqrt(mean(x^2) + eps) * weight * silu(gate) over rows of d numbers; a warp a row, 8 warps a block.
extern "C" __global__ void __launch_bounds__(256) norm_gate(float *out, const float *x, const float *gate,
                                                            const float *weight, int rows, int d, float eps) {
    let_successor_start();
    wait_for_predecessor();
    int lane = threadIdx.x % WARP, row = blockIdx.x * 8 + threadIdx.x / WARP;
    if (row >= rows) return;
    int64_t first = row * (int64_t)d;
    float values[LARGEST_HEAD / WARP], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LARGEST_HEAD / WARP; i++) {
        values[i] = lane + WARP * i < d ? x[first + lane + WARP * i] : 0.0f;
        sum += values[i] * values[i];
    }
    float scale = 1.0f / sqrtf(warp_sum(sum) / d + eps);
#pragma unroll
    for (int i = 0; i < LARGEST_HEAD / WARP; i++) {
        int number = lane + WARP * i;
        if (number < d) out[first + number] = silu(gate[first + number]) * (values[i] * scale * weight[number]);
    }
}

constexpr int AT_ONCE = 4;

#define DELTA(D_K)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 3) delta_rule_##D_K(const __grid_constant__ Delta a) {      \
        delta_rule<D_K, AT_ONCE, false>(a);                                                                                      \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 3) delta_tree_##D_K(const __grid_constant__ Delta a) {      \
        delta_rule<D_K, 1, true>(a);                                                                                       \
    }

DELTA(32)
DELTA(64)
DELTA(128)

// The rule of many tokens is these two, one after the other.
extern "C" __global__ void __launch_bounds__(4 * WARP) delta_prepare(const __grid_constant__ Delta a) {
    delta_prepare_chunk(a);
}
extern "C" __global__ void __launch_bounds__(COLUMNS / 4 * WARP, 2) delta_chunks(const __grid_constant__ Delta a) {
    extern __shared__ int4 memory[];
    multiply_chunks(a, *(ChunkMemory *)memory);
}

struct DeltaToken {
    Step conv, rule;
    float *out;                // (n_head_v * d)
    const float *x, *taps;     // ((2 n_head_k + n_head_v) * d): queries, keys, values before their convolution
    const float *alpha, *beta, *dt, *decay;  // (n_head_v)
    const float *norm, *gate;  // (d), (n_head_v * d)
    int n_head_k, n_head_v, d, kernel, tiled;
    float l2_eps, norm_eps, scale;
};

// One token through all of it, d a multiple of 4 and at most 128. A block a value head; a warp has every 16th row of its
// matrix, a thread four columns. The convolutions of a key head are computed by all of its value heads, kept by one.
extern "C" __global__ void __launch_bounds__(512, 1) delta_token(const __grid_constant__ DeltaToken a) {
    constexpr int D = LARGEST_HEAD, WARPS = 16, ROWS = D / WARPS;
    __shared__ float taken[3][D], squares[3][D / WARP], changes[D];
    __shared__ float4 sums[2][WARPS][WARP];
    int head = blockIdx.x, d = a.d, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, index = threadIdx.x % D;
    int64_t first = head * (int64_t)d * d;
    // The parity read this early may be that of the step before, so this is a hint; it must not enter the first-level
    // cache, where the true one would be looked for.
    const float *hint = a.rule.states[__ldcg(a.rule.control + 3) & 1] + first;
    for (int i = threadIdx.x * WARP; i < d * d; i += blockDim.x * WARP) prefetch(hint + i);
    let_successor_start();
    wait_for_predecessor();

    bool there = lane * 4 < d;
    const float *before = a.rule.before() + first;
    float4 state[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = warp + WARPS * i;
        state[i] = there && row < d ? *(const float4 *)(before + row * d + lane * 4) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float2 gate = gates(a.alpha[head], a.beta[head], a.dt[head], a.decay[head]);
    int per_key = a.n_head_v / a.n_head_k, from = a.tiled ? head % a.n_head_k : head / per_key;
    bool is_first = a.tiled ? head < a.n_head_k : head % per_key == 0;
    int part = warp / (D / WARP);  // queries, keys, values, nothing
    if (part < 3) {
        int width = (2 * a.n_head_k + a.n_head_v) * d;
        int channel = (part == 0 ? from : part == 1 ? a.n_head_k + from : 2 * a.n_head_k + head) * d + index;
        float value = index < d ? convolved(a.conv, a.x, a.taps, width, a.kernel, 0, channel) : 0.0f;
        taken[part][index] = value;
        float sum = warp_sum(value * value);
        if (lane == 0) squares[part][warp % (D / WARP)] = sum;
        if (index < d && (part == 2 || is_first)) keep_inputs(a.conv, a.x, width, a.kernel, channel);
    }
    __syncthreads();

    float norms[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < D / WARP; j++) sum += squares[i][j];
        norms[i] = 1.0f / sqrtf(sum + a.l2_eps);
    }
    float4 memory = make_float4(0.0f, 0.0f, 0.0f, 0.0f), out = memory;
    float keys[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float key = keys[i] = taken[1][warp + WARPS * i] * norms[1], query = taken[0][warp + WARPS * i] * norms[0];
        memory.x += state[i].x * key, memory.y += state[i].y * key, memory.z += state[i].z * key, memory.w += state[i].w * key;
        out.x += state[i].x * query, out.y += state[i].y * query, out.z += state[i].z * query, out.w += state[i].w * query;
    }
    sums[0][warp][lane] = memory;
    sums[1][warp][lane] = out;
    __syncthreads();

    float result = 0.0f;
    if (threadIdx.x < D) {
        float both = 0.0f, remembered = 0.0f;
#pragma unroll
        for (int i = lane; i < D; i += WARP) both += taken[0][i] * norms[0] * (taken[1][i] * norms[1]);
        both = warp_sum(both);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            remembered += ((const float *)sums[0][i])[index];
            result += ((const float *)sums[1][i])[index];
        }
        float change = changes[index] = gate.y * (taken[2][index] - gate.x * remembered);
        result = a.scale * (gate.x * result + both * change);
        float sum = warp_sum(result * result);
        if (lane == 0) squares[2][warp] = sum;
    }
    __syncthreads();

    if (threadIdx.x < d) {
        float sum = squares[2][0] + squares[2][1] + squares[2][2] + squares[2][3];
        float y = result * (1.0f / sqrtf(sum / d + a.norm_eps)) * a.norm[index];
        a.out[head * d + index] = silu(a.gate[head * d + index]) * y;
    }
    if (!a.rule.kept() || !there) return;
    float *after = a.rule.after() + first;
    float4 change = *(const float4 *)(changes + lane * 4);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = warp + WARPS * i;
        float4 s = state[i];
        s.x = s.x * gate.x + keys[i] * change.x, s.y = s.y * gate.x + keys[i] * change.y;
        s.z = s.z * gate.x + keys[i] * change.z, s.w = s.w * gate.x + keys[i] * change.w;
        if (row < d) *(float4 *)(after + row * d + lane * 4) = s;
    }
}
