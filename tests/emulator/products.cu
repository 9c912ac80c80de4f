// The products of more than one row, of some types: floats, and formats of every kind of level, scale and offset.
#include "few.cuh"
#include "grouped.cuh"
#include "matmul.cuh"

#define NAMES(MMA_8, MMA_16, WIDEN, GROUPED, FORMAT) \
    REFLEX_MATMUL(MMA_8, FORMAT, 8)                  \
    REFLEX_MATMUL(MMA_16, FORMAT, 16)                \
    REFLEX_WIDEN(WIDEN, FORMAT)                      \
    REFLEX_GROUPED(GROUPED, FORMAT)
#define FEW_NAMES(FEW_32, FEW_40, FEW_64, FORMAT) \
    REFLEX_FEW(FEW_32, FORMAT, 32)                \
    REFLEX_FEW(FEW_40, FORMAT, 40)                \
    REFLEX_FEW(FEW_64, FORMAT, 64)
#define FEW_NAME(FEW_64, FORMAT) REFLEX_FEW(FEW_64, FORMAT, 64)

NAMES(kernel_mma_f16_8, kernel_mma_f16_16, kernel_widen_f16, kernel_grouped_f16, F16)
NAMES(kernel_mma_bf16_8, kernel_mma_bf16_16, kernel_widen_bf16, kernel_grouped_bf16, BF16)
NAMES(kernel_mma_q4_k_8, kernel_mma_q4_k_16, kernel_widen_q4_k, kernel_grouped_q4_k, Q4_K)
NAMES(kernel_mma_q5_k_8, kernel_mma_q5_k_16, kernel_widen_q5_k, kernel_grouped_q5_k, Q5_K)
NAMES(kernel_mma_q6_k_8, kernel_mma_q6_k_16, kernel_widen_q6_k, kernel_grouped_q6_k, Q6_K)
NAMES(kernel_mma_q3_k_8, kernel_mma_q3_k_16, kernel_widen_q3_k, kernel_grouped_q3_k, Q3_K)
NAMES(kernel_mma_q5_0_8, kernel_mma_q5_0_16, kernel_widen_q5_0, kernel_grouped_q5_0, Q5_0)
NAMES(kernel_mma_q5_1_8, kernel_mma_q5_1_16, kernel_widen_q5_1, kernel_grouped_q5_1, Q5_1)
NAMES(kernel_mma_q8_0_8, kernel_mma_q8_0_16, kernel_widen_q8_0, kernel_grouped_q8_0, Q8_0)
NAMES(kernel_mma_mxfp4_8, kernel_mma_mxfp4_16, kernel_widen_mxfp4, kernel_grouped_mxfp4, MXFP4)
NAMES(kernel_mma_nvfp4_8, kernel_mma_nvfp4_16, kernel_widen_nvfp4, kernel_grouped_nvfp4, NVFP4)
NAMES(kernel_mma_iq3_s_8, kernel_mma_iq3_s_16, kernel_widen_iq3_s, kernel_grouped_iq3_s, IQ3_S)

FEW_NAME(kernel_few_f16_64, F16)
REFLEX_FEW(kernel_few_f16_40, F16, 40)
FEW_NAME(kernel_few_bf16_64, BF16)
REFLEX_FEW(kernel_few_bf16_40, BF16, 40)
FEW_NAMES(kernel_few_q4_k_32, kernel_few_q4_k_40, kernel_few_q4_k_64, Q4_K)
FEW_NAME(kernel_few_q5_k_64, Q5_K)
REFLEX_FEW(kernel_few_q5_k_40, Q5_K, 40)
FEW_NAMES(kernel_few_q6_k_32, kernel_few_q6_k_40, kernel_few_q6_k_64, Q6_K)
FEW_NAME(kernel_few_q5_0_64, Q5_0)
REFLEX_FEW(kernel_few_q5_0_40, Q5_0, 40)
FEW_NAMES(kernel_few_q8_0_32, kernel_few_q8_0_40, kernel_few_q8_0_64, Q8_0)
FEW_NAME(kernel_few_q3_k_64, Q3_K)
FEW_NAME(kernel_few_mxfp4_64, MXFP4)
FEW_NAME(kernel_few_nvfp4_64, NVFP4)
REFLEX_FEW(kernel_few_q4_k_16, Q4_K, 16)
REFLEX_FEW(kernel_few_q5_k_16, Q5_K, 16)
REFLEX_FEW(kernel_few_q6_k_16, Q6_K, 16)
