// Device code as host code: what the kernels use of CUDA C++, with the threads of a block as fibers of one thread.
//
// A fiber runs until it waits: at __syncthreads until all living threads of the block are there, at a warp operation
// until those of its warp are. So a missing barrier shows as a wrong result, always the same one.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct dim3_host { unsigned x, y, z; };
struct int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using half = _Float16;
struct half2 { half x, y; };
inline float __half2float(half x) { return float(x); }
inline half __float2half_rn(float x) { return half(x); }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline float2 __half22float2(half2 x) { return {float(x.x), float(x.y)}; }

using std::isfinite;
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN

extern dim3_host threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char *emulated_shared;  // of the block that runs,
extern int emulated_block, emulated_rank;  // a number of its own, and which of its cluster it is
unsigned char *emulated_shared_of(int rank);

void __syncthreads();
int __syncthreads_or(int predicate);
void __syncwarp(unsigned = ~0u);
void cluster_meets();
void keep_until_end(uint32_t at, uint32_t bytes);  // of the block's shared memory: nobody else writes there
void let_others_run();  // until this thread's turn comes again
[[noreturn]] void refuse(const char *why);
void *warp_slots();  // 32 places of 32 bytes of the running fiber's warp
template <class T>
T exchange(T x, int lane) {
    unsigned char *slots = (unsigned char *)warp_slots();
    memcpy(slots + threadIdx.x % 32 * 32, &x, sizeof x);
    __syncwarp();
    T y;
    memcpy(&y, slots + lane * 32, sizeof y);
    __syncwarp();
    return y;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int lanes) { return exchange(x, int(threadIdx.x % 32) ^ lanes); }
template <class T>
T __shfl_up_sync(unsigned, T x, int lanes) { int lane = threadIdx.x % 32; return exchange(x, lane < lanes ? lane : lane - lanes); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) { return exchange(x, lane); }
inline int __any_sync(unsigned, int is_so) {
    for (int lanes = 16; lanes; lanes /= 2) is_so |= __shfl_xor_sync(~0u, is_so, lanes);
    return is_so;
}

template <class T, class U>
T atomicAdd(T *p, U x) { T old = *p; *p += T(x); return old; }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline uint32_t __float_as_uint(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { return __float_as_uint(x); }
inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __double2float_rn(double a) { return float(a); }
inline long long __double2ll_rz(double a) { return (long long)a; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)a * b >> 64); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return std::max(a & 0xffffu, b & 0xffffu) | std::max(a & 0xffff0000u, b & 0xffff0000u);
}
template <class T>
T __ldg(const T *p) { return *p; }
template <class T>
T __ldcg(const T *p) { return *p; }
using std::max;
using std::min;

// Every kernel by name, with a call that unpacks the driver's array of pointers.
using Emulated = void (*)(void **);
std::map<std::string, std::pair<Emulated, int>> &emulated();
template <class... A, size_t... I>
void unpack(void (*f)(A...), void **p, std::index_sequence<I...>) { f(*(std::remove_const_t<A> *)p[I]...); }
template <auto f, class... A>
void call(void (*)(A...), void **p) { unpack(f, p, std::make_index_sequence<sizeof...(A)>()); }
template <auto f>
void entry(void **p) { call<f>(f, p); }
struct Register {
    Register(const char *name, Emulated f) { emulated()[name] = {f, 0}; }
};
