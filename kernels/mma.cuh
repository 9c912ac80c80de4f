// Tensor-core instructions, for every architecture from sm_75 on. Halves travel in pairs in 32 bits.
#pragma once

#include <stdint.h>

#include "copy.cuh"

namespace reflex {

// c += A B for a 16 x 8 A and an 8 x 8 B of halves: a0, a1 are rows g, g + 8, columns 2t, 2t + 1 and b column g, rows 2t,
// 2t + 1 of lane 4 g + t; c as below.
__device__ __forceinline__ void mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(b));
}

// c += A B for a 16 x 16 A and a 16 x 8 B of halves, float32 accumulators. With g = lane / 4 and t = lane % 4 a lane
// holds
//   a[0], a[1]: rows g, g + 8, columns 2t, 2t + 1;  a[2], a[3]: the same of columns 2t + 8, 2t + 9
//   b0, b1: column g, rows 2t, 2t + 1 and 2t + 8, 2t + 9
//   c[0..1], c[2..3]: rows g, g + 8, columns 2t, 2t + 1
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma8(c, a[0], a[1], b0);
  mma8(c, a[2], a[3], b1);
#endif
}

// --- four warps together, on sm_90a ---------------------------------------------------------------------------------
// c (+)= A B for 64 rows of A, 16 of each warp, which holds them as for `mma`, and N columns of B in shared memory: half
// k of column n is half k % 8 of the 16 bytes at address + k / 8 * leading + 16 n, b = group_operand(address, leading),
// and b + i is 16 i bytes on. c is as for `mma`, 8 columns an element. Nothing is there before `group_wait`, and until
// then the registers of A stay what they are. N is 16, 32, 40 or 64.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool has_groups = true;

__device__ __forceinline__ void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the latest `pending` that were committed are done.
template <int pending>
__device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// A register is used up to here.
__device__ __forceinline__ void group_keep(uint32_t& a) { asm volatile("" : "+r"(a)::"memory"); }

__device__ __forceinline__ uint64_t group_operand(uint32_t address, uint32_t leading) {
  return (address >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(128 >> 4) << 32;
}
#define REFLEX_FOUR(J) "+f"(c[J][0]), "+f"(c[J][1]), "+f"(c[J][2]), "+f"(c[J][3])
#define REFLEX_REST \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((uint32_t)is_first) : "memory"
__device__ __forceinline__ void group_multiply(float (&c)[2][4], const uint32_t (&a)[4], uint64_t b,
                                               bool is_first) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.eq.u32 more, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, more, 1, 1, 0;\n}"
      : REFLEX_FOUR(0), REFLEX_FOUR(1)
      : REFLEX_REST);
}
__device__ __forceinline__ void group_multiply(float (&c)[4][4], const uint32_t (&a)[4], uint64_t b,
                                               bool is_first) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.eq.u32 more, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, more, 1, 1, 0;\n}"
      : REFLEX_FOUR(0), REFLEX_FOUR(1), REFLEX_FOUR(2), REFLEX_FOUR(3)
      : REFLEX_REST);
}
__device__ __forceinline__ void group_multiply(float (&c)[5][4], const uint32_t (&a)[4], uint64_t b,
                                               bool is_first) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.eq.u32 more, %25, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n40k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19}, "
      "{%20,%21,%22,%23}, %24, more, 1, 1, 0;\n}"
      : REFLEX_FOUR(0), REFLEX_FOUR(1), REFLEX_FOUR(2), REFLEX_FOUR(3), REFLEX_FOUR(4)
      : REFLEX_REST);
}
__device__ __forceinline__ void group_multiply(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b,
                                               bool is_first) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.eq.u32 more, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, more, 1, 1, 0;\n}"
      : REFLEX_FOUR(0), REFLEX_FOUR(1), REFLEX_FOUR(2), REFLEX_FOUR(3), REFLEX_FOUR(4), REFLEX_FOUR(5), REFLEX_FOUR(6), REFLEX_FOUR(7)
      : REFLEX_REST);
}
#undef REFLEX_FOUR
#undef REFLEX_REST
#else
constexpr bool has_groups = false;
__device__ void group_begin();
__device__ void group_commit();
template <int pending>
__device__ void group_wait();
__device__ void group_keep(uint32_t& a);
__device__ uint64_t group_operand(uint32_t address, uint32_t leading);
template <int n>
__device__ void group_multiply(float (&c)[n][4], const uint32_t (&a)[4], uint64_t b, bool is_first);
#endif

// Four 8 x 8 matrices of halves; lanes 8 i .. 8 i + 7 say where in shared memory matrix i's rows are. Between these
// and what writes the rows stands a barrier, which the compiler keeps in its place.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  load_matrices(r, shared_address(row));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// A load that stays where it is written.
__device__ __forceinline__ uint4 load_now(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  uint32_t out;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
  unsigned short l, h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(l) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(high));
  out = l | (uint32_t)h << 16;
#endif
  return out;
}
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t subtract_halves(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

}  // namespace reflex
