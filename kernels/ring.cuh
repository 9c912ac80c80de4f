// Stages in shared memory that are filled while earlier ones are read: `Ring` for one warp, `Feed` for all of a block.
//
// From sm_90 on the copy engine fills a stage and counts bytes in its barrier: it may be asked for a stage as soon as the
// one before in the same place has been read. Before that, threads copy 16 bytes at a time and wait for their own copies
// in the order in which they committed them, and a Feed needs a barrier of the block around that.
#pragma once

#include "copy.cuh"

namespace reflex {

// One of `stages` places after the other, and whether the round is an even or an odd one.
struct Place {
  uint32_t at = 0, phase = 0;

  __device__ __forceinline__ void advance(uint32_t stages) {
    if (++at == stages) at = 0, phase ^= 1;
  }
};

struct Ring {
  uint32_t data;                 // shared address of the warp's stages, a multiple of 16
  uint32_t barriers;             // and of their barriers, 8 bytes each
  uint32_t stages, stage_bytes;  // at most 2; one is enough where copies do not run in the background
  Place next, oldest;            // stages: the one to fill, the one to empty

  // To be followed by a barrier of the warp.
  __device__ __forceinline__ Ring(uint32_t data, uint32_t barriers, uint32_t stages, uint32_t stage_bytes)
      : data(data), barriers(barriers), stages(stages), stage_bytes(stage_bytes) {
    if constexpr (has_copy_engine) {
      if (threadIdx.x % 32 == 0) begin_barriers(barriers, stages);
    }
  }

  // Fill the next stage. Lane r < rows copies `length` bytes (or none) from `from`, rows `slot` bytes apart; as copies
  // move 16 bytes at a time from multiples of 16, byte `from % 16` of its slot is the first. Every lane of the warp
  // calls it, also when there is nothing left to copy. `alike`: every `from` is a multiple of 16.
  template <bool alike>
  __device__ __forceinline__ void fill(int rows, int slot, const uint8_t* from, int length) {
    const int lane = threadIdx.x % 32;
    const uint32_t to = data + next.at * stage_bytes;
    const int early = alike ? 0 : (int)(reinterpret_cast<uintptr_t>(from) & 15);
    const uint8_t* begin = from - early;
    const int bytes = length > 0 ? (early + length + 15) & ~15 : 0;
    if constexpr (has_copy_engine) {
      const uint32_t total = alike ? rows * bytes : sum_of_warp(lane < rows ? bytes : 0);
      const uint32_t barrier = barriers + 8 * next.at;
      if (lane == 0) expect_bytes(barrier, total);
      if (lane < rows && length > 0) copy_bulk(to + lane * slot, begin, bytes, barrier);
    } else {
      for (int r = 0; r < rows; ++r) {
        const uint8_t* source =
            reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(begin), r));
        const int end = __shfl_sync(0xffffffffu, bytes, r);
        for (int at = 16 * lane; at < end; at += 512) copy16(to + r * slot + at, source + at, true);
      }
      commit_copies();
    }
    next.advance(stages);
  }

  // Wait for the oldest stage; its shared address.
  __device__ __forceinline__ uint32_t wait() {
    if constexpr (has_copy_engine) {
      wait_barrier(barriers + 8 * oldest.at, oldest.phase);
    } else {
      if (stages == 2) {
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncwarp();
    }
    return data + oldest.at * stage_bytes;
  }

  // The oldest stage has been read by this lane; when all have, it may be filled again.
  __device__ __forceinline__ void release() {
    __syncwarp();
    oldest.advance(stages);
  }

  // Forget the stages that are filled, all of which are empty.
  __device__ __forceinline__ void skip() { oldest = next; }
};

struct Feed {
  static constexpr uint32_t most = 4;                        // stages
  static constexpr uint32_t barrier_bytes = most * (8 + 4);  // barriers, then counts of the warps that have read a stage

  uint32_t data;      // shared address of the stages, a multiple of 16
  uint32_t barriers;  // and of the barriers
  uint32_t stages, stage_bytes;
  Place now;  // the one that this warp reads

  // To be followed by a barrier of the block.
  __device__ __forceinline__ Feed(uint32_t data, uint32_t barriers, uint32_t stages, uint32_t stage_bytes)
      : data(data), barriers(barriers), stages(stages), stage_bytes(stage_bytes) {
    if constexpr (has_copy_engine) {
      if (threadIdx.x == 0) {
        begin_barriers(barriers, stages);
        begin_counts(barriers + 8 * most, stages);
      }
    }
  }

  // `bytes`, a multiple of 16, into the stage at this place. One thread calls it where there is a copy engine, every
  // thread elsewhere, and commits.
  __device__ __forceinline__ void fill(uint32_t place, const void* from, int bytes) const {
    const uint32_t to = address(place);
    if constexpr (has_copy_engine) {
      expect_bytes(barriers + 8 * place, bytes);
      copy_bulk(to, from, bytes, barriers + 8 * place);
    } else {
      for (int at = 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x)
        copy16(to + at, static_cast<const uint8_t*>(from) + at, true);
    }
  }

  // Wait for the stage that comes now. Before sm_90 the thread has waited for its copies, and a barrier of the block
  // followed.
  __device__ __forceinline__ void wait() const {
    if constexpr (has_copy_engine) wait_barrier(barriers + 8 * now.at, now.phase);
  }

  // Every lane of the warp has read the stage, and __syncwarp() or the wait for the tensor core stands behind that. Whether
  // all other warps have too, and it is this lane's to fill it again; for a copy engine only.
  __device__ __forceinline__ bool is_last() const {
    const uint32_t last = blockDim.x / 32 - 1;
    return threadIdx.x % 32 == 0 && count_up(barriers + 8 * most + 4 * now.at, last) == last;
  }

  __device__ __forceinline__ uint32_t address(uint32_t place) const { return data + place * stage_bytes; }
};

}  // namespace reflex
