// Kernels may be launched while their predecessor still runs (programmatic dependent launch). Each says when its successor
// may be scheduled, by default when it ends, and every one waits for its predecessor before it reads what that leaves.
#pragma once

// The successor may be scheduled now, for it waits itself. Where this kernel fills the device, the successor's blocks
// would be in the way of those that still work: docs/decisions.md.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// From here on the predecessor's results are complete and visible: before it, no activation is read and nothing written.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
