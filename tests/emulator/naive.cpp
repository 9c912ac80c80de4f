// out[t][o] = x[t] . W[o] (+ bias[o]) (+ residual[t][o]), W dequantised exactly; norm and swiglu as linear.py says.
#include "cuda_host.h"
#include "dequant.cuh"

#include <vector>

struct Matrix { const uint8_t *weight; float *out; const float *bias, *residual; uint64_t expert_bytes; int type, n_out, out_stride, unused; };
struct Naive { const float *x, *norm; const float *ids; int n, width, stride, n_matrices, swiglu, n_used, id_stride, per_expert; float eps; int unused; Matrix m[4]; };

template <class F>
static void row_of(const uint8_t *p, int n, float *out) {
    for (int b = 0; b < n / F::elements; b++)
        for (int piece = 0; piece < reflex::pieces<F>; piece++) reflex::dequantise<F>(p + b * F::bytes, piece, out + b * F::elements);
}
static size_t decode(int type, const uint8_t *base, size_t row, int n, float *out) {
    using namespace reflex;
    if (type == 0) { memcpy(out, base + row * n * 4, n * 4); return 0; }
    if (type == 1) { const _Float16 *h = (const _Float16 *)(base + row * n * 2); for (int i = 0; i < n; i++) out[i] = h[i]; return 0; }
    if (type == 2) { const uint16_t *h = (const uint16_t *)(base + row * n * 2); for (int i = 0; i < n; i++) { uint32_t b = uint32_t(h[i]) << 16; memcpy(out + i, &b, 4); } return 0; }
#define CASE(id, F) if (type == id) { row_of<F>(base + row * (n / F::elements * F::bytes), n, out); return 0; }
    CASE(3, Q4_0) CASE(4, Q4_1) CASE(5, Q5_0) CASE(6, Q5_1) CASE(7, Q8_0) CASE(8, Q2_K) CASE(9, Q3_K) CASE(10, Q4_K) CASE(11, Q5_K) CASE(12, Q6_K)
    CASE(13, IQ4_NL) CASE(14, IQ4_XS) CASE(15, MXFP4) CASE(16, IQ3_S) CASE(17, IQ2_S) CASE(18, IQ3_XXS) CASE(19, IQ2_XS) CASE(20, IQ2_XXS) CASE(21, IQ1_S) CASE(22, IQ1_M)
    abort();
}

// One thread does it all.
static void naive_linear(const Naive a) {
    std::vector<float> x(a.width), w(a.width);
    int parts = a.ids ? a.n_used : 1;
    for (int t = 0; t < a.n; t++)
        for (int k = 0; k < parts; k++) {
            const float *row = a.x + (size_t)t * a.stride + (a.per_expert ? (size_t)k * a.width : 0);
            double sum = 0;
            for (int i = 0; i < a.width; i++) sum += double(row[i]) * row[i];
            float scale = 1 / sqrt(sum / a.width + a.eps);
            for (int i = 0; i < a.width; i++) x[i] = a.norm ? row[i] * scale * a.norm[i] : row[i];
            size_t expert = a.ids ? size_t(a.ids[(size_t)t * a.id_stride + k]) : 0;
            for (int j = 0; j < a.n_matrices; j++) {
                const Matrix &m = a.m[j];
                for (int o = 0; o < m.n_out; o++) {
                    decode(m.type, m.weight + expert * m.expert_bytes, o, a.width, w.data());
                    double dot = 0;
                    for (int i = 0; i < a.width; i++) dot += double(x[i]) * w[i];
                    size_t at = ((size_t)t * parts + k) * m.out_stride + o;
                    float y = dot + (m.bias ? m.bias[o] : 0) ;
                    if (a.swiglu && j == 1) { float &gate = a.m[0].out[((size_t)t * parts + k) * a.m[0].out_stride + o]; gate = gate / (1 + expf(-gate)) * y; continue; }
                    m.out[at] = y + (m.residual ? m.residual[at] : 0);
                }
            }
        }
}
static Register registered("naive_linear", entry<naive_linear>);
extern "C" void emulator_kernel(const char *, const int *, int);
static int sizes[] = {int(sizeof(Naive))};
static bool sized = (emulator_kernel("naive_linear", sizes, 1), true);
extern "C" int naive_size() { return sizeof(Naive); }
