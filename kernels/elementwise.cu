// Kernels that compute each number of a (T, width) float32 matrix from a few others. All take any grid and block.
//
//     swiglu        out = silu(gate) * up, silu(y) = y * sigmoid(y)
//     add           out = a + b
//     gate          out = x * sigmoid(g); g as wide as x (gate_width = width), or one number a row (gate_width = 1)
//     slice         columns [start, start + length) of each of n_group parts of a row, side by side
//     concat        a and b side by side
//     select_rows   out[i] = x[rows[i]]
//
// Rows are contiguous, `n` counts elements of `out`. out may be one of the inputs where the shapes agree, but for slice,
// concat and select_rows.
#include "block.cuh"

#define EACH(i, n) int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x

extern "C" __global__ void swiglu(float *out, const float *gate, const float *up, int64_t n) {
    let_successor_start();
    wait_for_predecessor();
    for (EACH(i, n)) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

extern "C" __global__ void add(float *out, const float *a, const float *b, int64_t n) {
    let_successor_start();
    wait_for_predecessor();
    for (EACH(i, n)) out[i] = a[i] + b[i];
}

extern "C" __global__ void gate(float *out, const float *x, const float *g, int64_t n, int width, int gate_width) {
    let_successor_start();
    wait_for_predecessor();
    for (EACH(i, n)) out[i] = x[i] * sigmoid(g[gate_width == 1 ? i / width : i]);
}

// x: (T, n_group * part), out: (T, n_group * length)
extern "C" __global__ void slice(float *out, const float *x, int64_t n, int part, int start, int length) {
    let_successor_start();
    wait_for_predecessor();
    for (EACH(i, n)) out[i] = x[i / length * part + start + i % length];
}

// a: (T, n_a), b: (T, n_b), out: (T, n_a + n_b)
extern "C" __global__ void concat(float *out, const float *a, const float *b, int64_t n, int n_a, int n_b) {
    let_successor_start();
    wait_for_predecessor();
    for (EACH(i, n)) {
        int64_t row = i / (n_a + n_b);
        int column = i % (n_a + n_b);
        out[i] = column < n_a ? a[row * n_a + column] : b[row * n_b + column - n_a];
    }
}

// x: (T, width), rows: (n / width), out: (n / width, width)
extern "C" __global__ void select_rows(float *out, const float *x, const int *rows, int64_t n, int width) {
    let_successor_start();
    wait_for_predecessor();
    for (EACH(i, n)) out[i] = x[rows[i / width] * (int64_t)width + i % width];
}
