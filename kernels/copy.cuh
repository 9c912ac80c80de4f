// Copies from global to shared memory that run while the threads do something else, where the architecture can.
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
#endif

// --- stages that a block fills with bytes that lie together --------------------------------------------------------
// From sm_90 on one thread asks the copy engine for all of them, before that every thread copies its share.

struct Feed {
  uint32_t barriers;  // of the stages, 8 bytes each

  // To be followed by a barrier of the block.
  __device__ __forceinline__ Feed(uint32_t barriers, uint32_t stages) : barriers(barriers) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) begin_barriers(barriers, stages);
#endif
  }
  // Every thread calls it.
  __device__ __forceinline__ void fill(uint32_t stage, uint32_t to, const void* from, int bytes) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      expect_bytes(barriers + 8 * stage, bytes);
      copy_bulk(to, from, bytes, barriers + 8 * stage);
    }
#else
    for (int at = 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x)
      copy16(to + at, static_cast<const uint8_t*>(from) + at, true);
#endif
  }
  // What was filled before any other copy was committed: before sm_90 these copies want a group of their own.
  __device__ __forceinline__ void commit() const {
#if __CUDA_ARCH__ < 900
    commit_copies();
#endif
  }
  // `phase`: how often the stage has been waited for, modulo 2. Before sm_90 the thread waits for its copies, and a
  // barrier of the block follows.
  __device__ __forceinline__ void wait(uint32_t stage, uint32_t phase) const {
#if __CUDA_ARCH__ >= 900
    wait_barrier(barriers + 8 * stage, phase);
#endif
  }
};

// --- a ring of stages that one warp fills and empties --------------------------------------------------------------
// From sm_90 on the copy engine moves whole rows and counts bytes in a barrier a stage; before that, lanes copy 16
// bytes.

struct Ring {
  uint32_t data;                      // shared address of the warp's stages, a multiple of 16
  uint32_t barriers;                  // and of their barriers, 8 bytes each
  uint32_t stages, stage_bytes;       // at most 2; one is enough where copies do not run in the background
  uint32_t next, oldest;              // stages: the one to fill, the one to empty
  uint32_t next_phase, oldest_phase;  // 0 and 1 in turns, a turn a round

  // To be followed by a barrier of the warp.
  __device__ __forceinline__ Ring(uint32_t data, uint32_t barriers, uint32_t stages, uint32_t stage_bytes)
      : data(data),
        barriers(barriers),
        stages(stages),
        stage_bytes(stage_bytes),
        next(0),
        oldest(0),
        next_phase(0),
        oldest_phase(0) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) begin_barriers(barriers, stages);
#endif
  }

  // Fill the next stage. Lane r < rows copies `length` bytes (or none) from `from`, rows `slot` bytes apart; as copies
  // move 16 bytes at a time from multiples of 16, byte `from % 16` of its slot is the first. Every lane of the warp
  // calls it, also when there is nothing left to copy. `alike`: every `from` is a multiple of 16.
  template <bool alike>
  __device__ __forceinline__ void fill(int rows, int slot, const uint8_t* from, int length) {
    const int lane = threadIdx.x % 32;
    const uint32_t to = data + next * stage_bytes;
    const int early = alike ? 0 : (int)(reinterpret_cast<uintptr_t>(from) & 15);
    const uint8_t* begin = from - early;
    const int bytes = length > 0 ? (early + length + 15) & ~15 : 0;
#if __CUDA_ARCH__ >= 900
    const int total = alike ? rows * bytes : (int)__reduce_add_sync(0xffffffffu, lane < rows ? bytes : 0);
    const uint32_t barrier = barriers + 8 * next;
    if (lane == 0) expect_bytes(barrier, total);
    if (lane < rows && length > 0) copy_bulk(to + lane * slot, begin, bytes, barrier);
#else
    for (int r = 0; r < rows; ++r) {
      const uint8_t* source =
          reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(begin), r));
      const int end = __shfl_sync(0xffffffffu, bytes, r);
      for (int at = 16 * lane; at < end; at += 512) copy16(to + r * slot + at, source + at, true);
    }
    commit_copies();
#endif
    advance(next, next_phase);
  }

  // Wait for the oldest stage; its shared address.
  __device__ __forceinline__ uint32_t wait() {
#if __CUDA_ARCH__ >= 900
    wait_barrier(barriers + 8 * oldest, oldest_phase);
#else
    if (stages == 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncwarp();
#endif
    return data + oldest * stage_bytes;
  }

  // The oldest stage has been read by this lane; when all have, it may be filled again.
  __device__ __forceinline__ void release() {
    __syncwarp();
    advance(oldest, oldest_phase);
  }

  // Forget the stages that are filled, all of which are empty.
  __device__ __forceinline__ void skip() {
    oldest = next;
    oldest_phase = next_phase;
  }

 private:
  __device__ __forceinline__ void advance(uint32_t& stage, uint32_t& phase) const {
    ++stage;
    if (stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace reflex
