// What the row kernels share: sums and maxima over a warp or a block, power-of-two scales.
//
// Sums have one fixed order: the same input gives the same bits.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

#include "dependent.cuh"

constexpr int WARP = 32;

// Fetch what lies at an address of global memory into the second-level cache.
__device__ __forceinline__ void prefetch(const void *p) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = WARP / 2; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lanes = WARP / 2; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

// The sum over all threads of a block of whole warps, the same in every thread. `room`: 32 floats of shared memory,
// free again after the next __syncthreads().
__device__ __forceinline__ float block_sum(float x, float *room) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0.0f;
    for (int warp = 0; warp < blockDim.x / WARP; warp++) x += room[warp];
    return x;
}

__device__ __forceinline__ float block_max(float x, float *room) {
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
    __syncthreads();
    x = room[0];
    for (int warp = 1; warp < blockDim.x / WARP; warp++) x = fmaxf(x, room[warp]);
    return x;
}

// 2^e for -126 <= e <= 127.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// floor(log2 x) of a positive normal float; -127 for zero and subnormals, 128 for infinity and NaN.
__device__ __forceinline__ int exponent_of(float x) { return ((__float_as_int(x) >> 23) & 0xff) - 127; }

__device__ __forceinline__ float sigmoid(float x) {
    // exp only of what is not positive, so that nothing overflows.
    float e = expf(-fabsf(x));
    return x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}
