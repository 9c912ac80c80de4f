// What delta-net layers keep: the last inputs of a convolution, and one matrix a head. Both are held twice, so that a step
// can be taken back: a step reads the state of the parity in `control` and leaves that of its kept tokens in the other.
// A plain text keeps all of its tokens, a tree those along a first branch, or none.
//
// parents (T): the token before each within the step, -1 for the state, -2 for nothing; null for a plain text.
#pragma once

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

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// silu of a causal depthwise convolution, for one token and channel of inputs (T, width): taps (width, kernel), the last
// tap for the token itself. The state is the last kernel - 1 inputs, oldest first.
__device__ __forceinline__ float convolved(const Step &s, const float *inputs, const float *taps, int width, int kernel,
                                           int token, int channel) {
    const float *tail = s.before();
    float sum = 0.0f;
    int at = token, behind = 0;  // once the step's own tokens are used up: how many of the state's
    for (int tap = kernel - 1; tap >= 0; tap--) {
        float input = 0.0f;
        if (at >= 0) {
            input = inputs[at * (int64_t)width + channel];
            at = s.parent(at);
        } else if (at == -1) {
            input = tail[(kernel - 2 - behind) * (int64_t)width + channel];
            behind++;
        }
        sum += input * taps[channel * kernel + tap];
    }
    return silu(sum);
}

// The convolution's state after the step, for one channel.
__device__ __forceinline__ void keep_inputs(const Step &s, const float *inputs, int width, int kernel, int channel) {
    const float *tail = s.before();
    int kept = s.kept();
    if (!kept) return;
    for (int row = 0; row < kernel - 1; row++) {
        int from = row + kept;
        s.after()[row * (int64_t)width + channel] = from < kernel - 1 ? tail[from * (int64_t)width + channel]
                                                                      : inputs[(from - kernel + 1) * (int64_t)width + channel];
    }
}

// Of a head and a token: what is left of the state, exp(softplus(alpha + dt) decay), and what of a change is written.
__device__ __forceinline__ float2 gates(float alpha, float beta, float dt, float decay) {
    float x = alpha + dt;
    float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    return make_float2(expf(softplus * decay), sigmoid(beta));
}
