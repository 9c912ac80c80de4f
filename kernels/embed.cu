// Rows of a matrix, dequantised exactly as the reference does: out[t] = weight[tokens[t]], which is what embeds tokens.
// Without tokens the first T rows of each of several matrices that begin `matrix_bytes` apart.
//
// weight: rows of `row_bytes` bytes in GGUF blocks; out (matrices, T, width) float32. Grid (any, T, matrices), any block.
#include "block.cuh"
#include "dequant.cuh"

namespace {

struct F32 {
    static constexpr int bytes = 4;
    static __device__ __forceinline__ float element(const uint8_t *p) { return *(const float *)p; }
};
struct F16 {
    static constexpr int bytes = 2;
    static __device__ __forceinline__ float element(const uint8_t *p) { return __half2float(*(const half *)p); }
};
struct BF16 {
    static constexpr int bytes = 2;
    static __device__ __forceinline__ float element(const uint8_t *p) {
        return __uint_as_float(uint32_t(*(const uint16_t *)p) << 16);
    }
};

template <class Float>
__device__ __forceinline__ void floats(float *out, const uint8_t *row, int width) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x)
        out[i] = Float::element(row + i * Float::bytes);
}

template <class Format>
__device__ __forceinline__ void blocks(float *out, const uint8_t *row, int width) {
    constexpr int a_block = reflex::pieces<Format>;
    int n = width / Format::elements * a_block;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        reflex::dequantise<Format>(row + i / a_block * Format::bytes, i % a_block, out + i / a_block * Format::elements);
}

}  // namespace

#define EMBED(TYPE, ROW)                                                                                                 \
    extern "C" __global__ void embed_##TYPE(float *out, const uint8_t *weight, const int *tokens, int width,             \
                                            int row_bytes, int64_t matrix_bytes) {                                       \
        let_successor_start();                                                                                           \
        wait_for_predecessor();                                                                                          \
        int64_t row = tokens ? tokens[blockIdx.y] : blockIdx.y, to = blockIdx.z * (int64_t)gridDim.y + blockIdx.y;       \
        ROW(out + to * width, weight + blockIdx.z * matrix_bytes + row * row_bytes, width);                              \
    }

EMBED(F32, floats<F32>)
EMBED(F16, floats<F16>)
EMBED(BF16, floats<BF16>)
EMBED(Q4_0, blocks<reflex::Q4_0>)
EMBED(Q4_1, blocks<reflex::Q4_1>)
EMBED(Q5_0, blocks<reflex::Q5_0>)
EMBED(Q5_1, blocks<reflex::Q5_1>)
EMBED(Q8_0, blocks<reflex::Q8_0>)
EMBED(Q2_K, blocks<reflex::Q2_K>)
EMBED(Q3_K, blocks<reflex::Q3_K>)
EMBED(Q4_K, blocks<reflex::Q4_K>)
EMBED(Q5_K, blocks<reflex::Q5_K>)
EMBED(Q6_K, blocks<reflex::Q6_K>)
EMBED(IQ4_NL, blocks<reflex::IQ4_NL>)
EMBED(IQ4_XS, blocks<reflex::IQ4_XS>)
EMBED(MXFP4, blocks<reflex::MXFP4>)
EMBED(NVFP4, blocks<reflex::NVFP4>)
EMBED(Q1_0, blocks<reflex::Q1_0>)
EMBED(Q2_0, blocks<reflex::Q2_0>)
EMBED(TQ1_0, blocks<reflex::TQ1_0>)
EMBED(TQ2_0, blocks<reflex::TQ2_0>)
EMBED(IQ1_S, blocks<reflex::IQ1_S>)
EMBED(IQ1_M, blocks<reflex::IQ1_M>)
EMBED(IQ2_XXS, blocks<reflex::IQ2_XXS>)
EMBED(IQ2_XS, blocks<reflex::IQ2_XS>)
EMBED(IQ2_S, blocks<reflex::IQ2_S>)
EMBED(IQ3_XXS, blocks<reflex::IQ3_XXS>)
EMBED(IQ3_S, blocks<reflex::IQ3_S>)
