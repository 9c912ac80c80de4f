// Many rows at once: out = x W^T with both factors in memory as they are multiplied.
//
// gemm_half: halves on tensor cores, float32 sums. x (m, k) has a power of two a row (rows.cu), W (n, k) one a row
// (widen in matmul.cuh) or, where it is an F16 weight of the file itself, none. A block computes 128 x 128 of the
// result in steps of 64 columns, `stages` of which are in shared memory; its 8 warps have 64 x 32 each, or 16 x 128
// where groups of four multiply straight from shared memory (sm_90a). In shared memory a row is 128 bytes, 8 chunks of
// 16, chunk c of row r at place c ^ (r % 8): neither copies nor matrix loads meet in a bank.
// Where half precision is too little, x has a second plane with what its halves lost behind each row, and so has W if it
// was quantised: the sums then run over the columns of x W, of (rest of x) W, and of x (rest of W) (`planes` 2 or 3).
// SwiGLU: rows 2 i and 2 i + 1 of W are row i of gate and of up; a lane has both sums of a pair.
// Launch: 256 threads, grid (ceil(m / 128), ceil(n / 128)), dynamic shared memory stages * 32768 bytes and, on sm_90a,
// 1024 more. k and both strides multiples of 8, rows 16-byte aligned.
//
// gemm_float: float32 weights, whose products stay float32 (routers need it). 64 x 64 a block, 4 x 4 a thread.
// Launch: 256 threads, grid (ceil(m / 64), ceil(n / 64)).
#include "linear.cuh"
#include "mma.cuh"

namespace reflex {

struct GemmArgs {
  const void* x;          // (m, x_stride): halves, or float32
  const float* x_scale;   // (m)
  const void* w;          // (n, w_stride): halves, or float32
  const float* w_scale;   // (n) or null
  float* out;             // (m, out_stride)
  const float* bias;      // (n) or null; of gate with SwiGLU
  const float* up_bias;   // of up
  const float* residual;  // (m, out_stride) or null
  int m, n, k;
  int x_stride, w_stride, out_stride;
  int stages, swiglu;
  int planes;  // 1, 2, 3
};

constexpr int gemm_threads = 256;
constexpr int gemm_tile = 128;                             // rows of x, and of W
constexpr int gemm_step = 64;                              // columns
constexpr int gemm_stage = 2 * gemm_tile * gemm_step * 2;  // bytes

// Where chunk `chunk` of row `row` is in a tile.
__device__ __forceinline__ uint32_t place(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// What a warp has of the result: 16-row by 8-column parts, four sums of each a lane as `mma` has them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int part_rows = 1, part_columns = 16;
#else
constexpr int part_rows = 4, part_columns = 4;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A matrix of 128-byte rows in the arrangement of `place`, from `address` on: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// sum += A B^T for the 64 rows of A and 128 rows of B at these places, 16 columns; a group of four warps together.
__device__ __forceinline__ void multiply_group(float (&d)[part_rows][part_columns][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
      "%60,%61,"
      "%62,%63}, %64, %65, 1, 1, 1, 0, 0;"
#define REFLEX_FOUR(J) "+f"(d[0][J][0]), "+f"(d[0][J][1]), "+f"(d[0][J][2]), "+f"(d[0][J][3])
      : REFLEX_FOUR(0), REFLEX_FOUR(1), REFLEX_FOUR(2), REFLEX_FOUR(3), REFLEX_FOUR(4), REFLEX_FOUR(5), REFLEX_FOUR(6),
        REFLEX_FOUR(7), REFLEX_FOUR(8), REFLEX_FOUR(9), REFLEX_FOUR(10), REFLEX_FOUR(11), REFLEX_FOUR(12),
        REFLEX_FOUR(13), REFLEX_FOUR(14), REFLEX_FOUR(15)
#undef REFLEX_FOUR
      : "l"(a), "l"(b));
}
#endif

// sum += x W^T for the tiles at these shared addresses; the warp's part begins at (warp_m, warp_n).
__device__ __forceinline__ void multiply_step(float (&sum)[part_rows][part_columns][4], uint32_t x_tile,
                                              uint32_t w_tile, int warp_m, int warp_n) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t a = descriptor(x_tile + (warp_m / 64 * 64) * 128), b = descriptor(w_tile);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < gemm_step / 16; ++k) multiply_group(sum, a + 2 * k, b + 2 * k);  // 32 bytes on, in units of 16
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < gemm_step / 16; ++k) {
    uint32_t a[4][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) load_matrices(a[i], x_tile + place(warp_m + 16 * i + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_matrices(b[j], w_tile + place(warp_n + 16 * j + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
#endif
}

// The products of the step are in the sums.
__device__ __forceinline__ void finish_step() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

}  // namespace reflex

using namespace reflex;

extern "C" __global__ void __launch_bounds__(gemm_threads, 2) gemm_half(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
#else
  const uint32_t base = shared_address(shared);
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int m0 = blockIdx.x * gemm_tile, n0 = blockIdx.y * gemm_tile;  // neighbours share W
  const int warp_m = part_rows == 1 ? warp * 16 : warp / 4 * 64, warp_n = part_rows == 1 ? 0 : warp % 4 * 32;
  const int a_plane = (args.k + gemm_step - 1) / gemm_step, n_steps = args.planes * a_plane;
  wait_for_predecessor();

  // A thread copies chunk threadIdx.x % 8 of rows threadIdx.x / 8 + 32 i of both tiles.
  const int copy_row = threadIdx.x / 8, copy_chunk = threadIdx.x % 8;
  const uint16_t* x = static_cast<const uint16_t*>(args.x) + 8 * copy_chunk;
  const uint16_t* w = static_cast<const uint16_t*>(args.w) + 8 * copy_chunk;
  auto copy = [&](int step, int stage) {
    const uint32_t to = base + stage * gemm_stage;
    const int plane = (step >= a_plane) + (step >= 2 * a_plane);
    const int column = (step - plane * a_plane) * gemm_step;
    const int x_column = column + (plane == 1 ? args.x_stride / 2 : 0);
    const int w_column = column + (plane == 2 ? args.w_stride / 2 : 0);
    const bool inside = step < n_steps && column + 8 * copy_chunk < args.k;
#pragma unroll
    for (int i = 0; i < gemm_tile / 32; ++i) {
      const int row = copy_row + 32 * i;
      const int m = min(m0 + row, args.m - 1), n = min(n0 + row, args.n - 1);
      copy16(to + place(row, copy_chunk), x + (inside ? (size_t)m * args.x_stride + x_column : 0),
             inside && m0 + row < args.m);
      copy16(to + gemm_tile * 128 + place(row, copy_chunk), w + (inside ? (size_t)n * args.w_stride + w_column : 0),
             inside && n0 + row < args.n);
    }
    commit_copies();
  };

  float sum[part_rows][part_columns][4] = {};
  for (int s = 0; s < args.stages - 1; ++s) copy(s, s);
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < n_steps; ++step) {
    // This step's copies have arrived for every thread, and everyone is done with the stage that is filled next.
    if (args.stages > 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    publish_copies();
    __syncthreads();
    copy(step + args.stages - 1, stage == 0 ? args.stages - 1 : stage - 1);
    const uint32_t x_tile = base + stage * gemm_stage;
    multiply_step(sum, x_tile, x_tile + gemm_tile * 128, warp_m, warp_n);
    finish_step();
    stage = stage + 1 == args.stages ? 0 : stage + 1;
  }

#pragma unroll
  for (int i = 0; i < part_rows; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = m0 + warp_m + 16 * i + lane / 4 + 8 * half;
      if (m >= args.m) continue;
      const float x_scale = args.x_scale[m];
      const size_t row = (size_t)m * args.out_stride;
#pragma unroll
      for (int j = 0; j < part_columns; ++j) {
        const int n = n0 + warp_n + 8 * j + lane % 4 * 2;
        float v[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          v[c] = sum[i][j][2 * half + c] * x_scale;
          if (args.w_scale && n + c < args.n) v[c] *= args.w_scale[n + c];
        }
        if (args.swiglu) {
          if (n >= args.n) continue;
          if (args.bias) v[0] += args.bias[n / 2];
          if (args.up_bias) v[1] += args.up_bias[n / 2];
          float y = silu(v[0]) * v[1];
          if (args.residual) y += args.residual[row + n / 2];
          args.out[row + n / 2] = y;
        } else {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (n + c >= args.n) continue;
            if (args.bias) v[c] += args.bias[n + c];
            if (args.residual) v[c] += args.residual[row + n + c];
            args.out[row + n + c] = v[c];
          }
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(gemm_threads) gemm_float(const __grid_constant__ GemmArgs args) {
  constexpr int tile = 64, step = 16, pad = 4;
  __shared__ float x_tile[step][tile + pad], w_tile[step][tile + pad];
  const int m0 = blockIdx.x * tile, n0 = blockIdx.y * tile;
  const int tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
  const float* x = static_cast<const float*>(args.x);
  const float* w = static_cast<const float*>(args.w);
  wait_for_predecessor();
  float sum[4][4] = {};
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += step) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < tile * step / gemm_threads; ++i) {
      const int row = threadIdx.x / step + i * (gemm_threads / step), column = threadIdx.x % step;
      const bool inside = k0 + column < args.k;
      x_tile[column][row] = inside && m0 + row < args.m ? x[(size_t)(m0 + row) * args.x_stride + k0 + column] : 0.0f;
      w_tile[column][row] = inside && n0 + row < args.n ? w[(size_t)(n0 + row) * args.w_stride + k0 + column] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < step; ++k) {
      const float4 a = *reinterpret_cast<const float4*>(&x_tile[k][tm]),
                   b = *reinterpret_cast<const float4*>(&w_tile[k][tn]);
      const float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(av[i], bv[j], sum[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int m = m0 + tm + i, n = n0 + tn + j;
      if (m >= args.m || n >= args.n) continue;
      const size_t at = (size_t)m * args.out_stride + n;
      float v = sum[i][j];
      if (args.bias) v += args.bias[n];
      if (args.residual) v += args.residual[at];
      args.out[at] = v;
    }
  }
}
