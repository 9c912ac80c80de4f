// Copies from global to shared memory that run while the threads do something else, where the architecture can. ring.cuh
// has what is built of them.
#pragma once

#include <stdint.h>

namespace reflex {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, or zeros. Where copies cannot be asynchronous they are done at once.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
#else
  const uint4 v = there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the latest `pending` groups have arrived.
template <int pending>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// What this thread has copied is seen by instructions that multiply straight from shared memory.
__device__ __forceinline__ void publish_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// --- barriers in shared memory that count bytes, 8 bytes each, and the copy engine that they wait for --------------------

#if __CUDA_ARCH__ >= 900
constexpr bool has_copy_engine = true;

__device__ __forceinline__ void begin_barriers(uint32_t barriers, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t n) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred ready;\n"
      "again:\nmbarrier.try_wait.parity.shared.b64 ready, [%0], %1;\n"
      "@!ready bra again;\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
// One more at a count in shared memory, which goes from 0 to `last` and then is 0 again; what it was. Relaxed: a fence of
// the block would wait for copies that are under way. It is for threads that have only read shared memory, which serves
// the accesses of a warp in their order.
__device__ __forceinline__ uint32_t count_up(uint32_t count, uint32_t last) {
  uint32_t before;
  asm volatile("atom.relaxed.cta.shared.inc.u32 %0, [%1], %2;" : "=r"(before) : "r"(count), "r"(last) : "memory");
  return before;
}
__device__ __forceinline__ void begin_counts(uint32_t counts, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) asm volatile("st.shared.u32 [%0], 0;" ::"r"(counts + 4 * i) : "memory");
}
__device__ __forceinline__ uint32_t sum_of_warp(uint32_t n) { return __reduce_add_sync(0xffffffffu, n); }
#else
constexpr bool has_copy_engine = false;

__device__ void begin_barriers(uint32_t barriers, uint32_t n);
__device__ void expect_bytes(uint32_t barrier, uint32_t n);
__device__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
__device__ void wait_barrier(uint32_t barrier, uint32_t phase);
__device__ uint32_t count_up(uint32_t count, uint32_t last);
__device__ void begin_counts(uint32_t counts, uint32_t n);
__device__ uint32_t sum_of_warp(uint32_t n);
#endif

// --- clusters: blocks that run at once and read each other's shared memory -----------------------------------------------

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool has_clusters = true;

// All threads of all blocks are here, and what they wrote before is seen.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// From this address of shared memory, a multiple of 16, of a block of the cluster.
__device__ __forceinline__ float4 load_of_block(uint32_t address, uint32_t block) {
  float4 v;
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(block)
      : "memory");
  return v;
}
#else
constexpr bool has_clusters = false;

__device__ void cluster_barrier();
__device__ float4 load_of_block(uint32_t address, uint32_t block);
#endif

}  // namespace reflex
