// Matrix-vector products: out = W x for one row x, up to four matrices W a launch.
//
// The arithmetic is in product.cuh.
//
// Layout: a tile is 2 or 4 rows of W. `lanes` threads of a block (8 .. 256, a power of two) share one: lane l of them
// takes pieces l, l + lanes, ... of each row. Blocks take tiles blockIdx.x, + gridDim.x, ... through all matrices. Each
// warp has a ring of stages in shared memory (copy.cuh) that holds the next bytes of its rows. Sums are formed in an
// order that only the shape determines.
//
// Launch: 256 threads; dynamic shared memory as `linear.py` computes it; blockIdx.y is a row of x (or one of a token's
// experts). x 16-byte aligned, strides multiples of 4 where W is quantised. The ring is filled before the predecessor
// is waited for: the upload of W must be complete when the predecessor starts. Copies read up to 15 bytes around a row.
#pragma once

#include "ring.cuh"
#include "product.cuh"

namespace reflex {

struct MatvecArgs {
  const float* x;             // (rows of x, x_stride)
  const float* norm;          // (n_row) RMSNorm weight, or null: x as it is
  const float* expert_ids;    // (tokens, expert_stride), the first n_used of each are ids; or null
  int n_row;                  // elements of a row of W and of x
  int k_begin, n_in;          // the columns of this launch: [k_begin, k_begin + n_in)
  int x_stride;               // from a token's x to the next one's
  int x_expert_stride;        // from the x of a token's expert to that of its next expert
  int expert_stride, n_used;  // of expert_ids; n_used is 1 without experts
  float eps;
  int n_matrix;
  int swiglu;  // 1: out of matrix 0 is silu(W0 x) * (W1 x); or 0
  int lanes_log2;
  int second;               // bit i: matrix i has the kernel's second format
  int x_bytes;              // of shared memory
  int stages, stage_bytes;  // of a warp's ring
  Matrix matrix[max_matrices];
};

constexpr int matvec_partials = 2 * 128;  // floats of shared memory for sums on their way from lane to lane
constexpr int matvec_stages = 2;          // at most
constexpr int matvec_barriers = 128;      // bytes of shared memory for the barriers of eight rings

// --- tiles ---------------------------------------------------------------------------------------------------------

// Sums over `width` neighbouring lanes (8, 16 or 32): lanes width / N * r and up end with the sum of v[r].
template <int N>
__device__ __forceinline__ float sum_lanes(const float (&v)[N], int width) {
  constexpr uint32_t all = 0xffffffffu;
  int d = width / 2;
  const bool upper = threadIdx.x & d;
  float s;
  if constexpr (N == 4) {
    const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(all, upper ? v[0] : v[2], d);
    const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(all, upper ? v[1] : v[3], d);
    d /= 2;
    const bool odd = threadIdx.x & d;
    s = (odd ? b : a) + __shfl_xor_sync(all, odd ? a : b, d);
  } else {
    static_assert(N == 2, "");
    s = (upper ? v[1] : v[0]) + __shfl_xor_sync(all, upper ? v[0] : v[1], d);
  }
#pragma unroll 1
  for (d /= 2; d; d /= 2) s += __shfl_xor_sync(all, s, d);
  return s;
}

// A matrix, or gate and up, cut into tiles; and how the threads of a block share one. Little is kept: registers are
// dear, and all of it follows from the arguments.
template <class Format>
struct Tiles {
  using P = Product<Format>;
  static constexpr int rows = P::rows;

  const MatvecArgs& args;
  int which;  // matrix

  __device__ __forceinline__ const Matrix& gate() const {
    return args.matrix[which];
  }  // of the first half of a tile's rows;
  __device__ __forceinline__ const Matrix& up() const {
    return args.matrix[args.swiglu ? 1 : which];
  }  // of the second half
  // Rows of the output from a tile, and from a block's: powers of two.
  __device__ __forceinline__ int yield() const { return args.swiglu ? rows / 2 : rows; }
  __device__ __forceinline__ int at_once_log2() const { return (rows == 4 ? 10 : 9) - args.swiglu - args.lanes_log2; }
  // Blocks' worth of tiles.
  __device__ __forceinline__ int count() const { return (gate().n_out - 1 >> at_once_log2()) + 1; }

  __device__ __forceinline__ int lanes() const { return 1 << args.lanes_log2; }
  __device__ __forceinline__ int width() const { return 1 << min(args.lanes_log2, 5); }
  // This thread's place among the lanes of its tile, and which of the block's tiles that is.
  __device__ __forceinline__ int start() const { return threadIdx.x & (lanes() - 1); }
  __device__ __forceinline__ int group() const { return threadIdx.x >> args.lanes_log2; }
  // Steps along a row; bytes of a row from one step to the next, and what a warp takes of them.
  __device__ __forceinline__ int steps() const {
    return ((args.n_in + P::piece_elements - 1) / P::piece_elements + lanes() - 1) >> args.lanes_log2;
  }
  __device__ __forceinline__ int hop() const { return lanes() / P::block_pieces * P::block_bytes; }
  __device__ __forceinline__ int segment() const { return width() / P::block_pieces * P::block_bytes; }
  // From a segment to that of the warp's next row in a stage.
  __device__ __forceinline__ int slot() const { return (segment() + (P::alignment < 16 ? 16 : 0) + 15) & ~15; }

  // Where this warp's part of row `r` (0 .. rows - 1) of tile `group` of the block's tile `tile` begins.
  __device__ __forceinline__ const uint8_t* row(size_t expert, int tile, int group, int r) const {
    const bool second = r >= yield();
    const int index = (tile << at_once_log2()) + group * yield() + (second ? r - yield() : r);
    return (second ? up() : gate()).weight + expert * gate().expert_bytes + row_bytes<Format>(args.k_begin) +
           start() / 32 * segment() + (size_t)min(index, gate().n_out - 1) * row_bytes<Format>(args.n_row);
  }
};

// What a warp's ring reads next.
struct Cursor {
  const uint8_t* from;   // lane r: what comes next of row r of the warp's,
  int tile, step, left;  // its tile and step, and the bytes of the row that are left
};

template <class Format>
struct Reader {
  const Tiles<Format>& tiles;
  size_t expert;
  Cursor& at;

  __device__ __forceinline__ void seek(int tile) {
    constexpr int rows = Tiles<Format>::rows;
    const int lane = threadIdx.x % 32, of_warp = 32 / tiles.width();  // tiles
    at.tile = tile;
    at.step = 0;
    at.from =
        tiles.row(expert, tile, of_warp == 1 ? tiles.group() : threadIdx.x / 32 * of_warp + lane / rows, lane % rows);
    at.left =
        tile < tiles.count() ? (int)row_bytes<Format>(tiles.args.n_in) - tiles.start() / 32 * tiles.segment() : 0;
  }

  __device__ __forceinline__ void fill(Ring& ring) {
    ring.template fill<Product<Format>::alignment % 16 == 0>(Tiles<Format>::rows * 32 / tiles.width(), tiles.slot(),
                                                             at.from, min(tiles.segment(), at.left));
    at.from += tiles.hop();
    at.left -= tiles.hop();
    if (++at.step == tiles.steps()) seek(at.tile + gridDim.x);
  }
};

// The block's tiles of one matrix, from `tile` on, whose first stages are in the ring.
template <class Format>
__device__ __forceinline__ void multiply(const Tiles<Format>& tiles, Reader<Format>& reader, int tile,
                                         const typename Product<Format>::X& x, float* partial, Ring& ring) {
  using P = Product<Format>;
  constexpr int rows = P::rows;
  const MatvecArgs& args = tiles.args;
  const int lanes = tiles.lanes(), width = tiles.width(), start = tiles.start();
  const bool aligned = row_bytes<Format>(args.n_row) % 16 == 0;
  const int within = start % P::block_pieces;
  const int hop_units = lanes / P::block_pieces * P::block_units;
  const int first_unit = start / P::block_pieces * P::block_units, n_units = args.n_in / P::unit_elements - first_unit;
  const typename P::Places places = P::places(within, first_unit);
  // This lane's block in a stage, but for the bytes by which copies begin early.
  const int in_stage = threadIdx.x % 32 / width * rows * tiles.slot() + start % 32 / P::block_pieces * P::block_bytes;

#pragma unroll 1
  for (int parity = 0; tile < tiles.count(); tile += gridDim.x, parity ^= 1) {
    uint32_t low[rows];  // lowest bits of the rows' addresses
    if constexpr (P::alignment < 16) {
#pragma unroll
      for (int r = 0; r < rows; ++r) low[r] = low_bits(tiles.row(reader.expert, tile, tiles.group(), r));
    }
    float sum[rows] = {};
    int unit = 0;
#pragma unroll 1
    for (int step = tiles.steps(); step > 0; --step) {
      const uint32_t stage = ring.wait() + in_stage;
      auto block = [&](int r) { return SharedBytes{stage + r * tiles.slot() + (P::alignment < 16 ? low[r] & 15 : 0)}; };
      if (unit < n_units) P::add(block, within, x, places, unit, n_units - unit, aligned, sum);
      ring.release();
      reader.fill(ring);
      unit += hop_units;
      if constexpr (P::alignment < 16) {
#pragma unroll
        for (int r = 0; r < rows; ++r) low[r] += tiles.hop();
      }
    }

    const float s = sum_lanes(sum, width);
    const int quota = width / rows;  // lanes that hold the sum of one row
    float* mine = partial + parity * (matvec_partials / 2) + threadIdx.x / width * rows;
    if (threadIdx.x % quota == 0) mine[threadIdx.x % width / quota] = s;
    if (lanes > 32) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    const int to = (tile << tiles.at_once_log2()) + tiles.group() * tiles.yield() + start;
    if (start < tiles.yield() && to < tiles.gate().n_out) {
      const int parts = lanes / width;
      float v = 0;
#pragma unroll 1
      for (int p = 0; p < parts; ++p) v += mine[p * rows + start];
      if (tiles.gate().bias) v += tiles.gate().bias[to];
      if (args.swiglu) {
        float up = 0;
#pragma unroll 1
        for (int p = 0; p < parts; ++p) up += mine[p * rows + tiles.yield() + start];
        if (tiles.up().bias) up += tiles.up().bias[to];
        v = silu(v) * up;
      }
      const size_t at = (size_t)blockIdx.y * tiles.gate().out_stride + to;
      if (tiles.gate().residual) v += tiles.gate().residual[at];
      tiles.gate().out[at] = v;
    }
  }
}

template <class Format>
struct As {
  using type = Format;
};

template <class First, class Second>
__device__ __forceinline__ void matvec(const MatvecArgs& args) {
  static_assert(is_float<First> == is_float<Second>, "they share x");
  constexpr bool is_pair = !is_same<First, Second>::value;
  using X = typename Product<First>::X;
  extern __shared__ __align__(16) uint8_t shared[];
  float* partial = reinterpret_cast<float*>(shared);
  const int n_matrix = args.swiglu ? 1 : args.n_matrix, warp = threadIdx.x / 32;
  const uint32_t base = shared_address(shared), barriers = base + matvec_partials * (int)sizeof(float);
  const uint32_t at_x = matvec_partials * sizeof(float) + matvec_barriers;
  Ring ring(base + at_x + args.x_bytes + warp * args.stages * args.stage_bytes, barriers + warp * matvec_stages * 8,
            args.stages, args.stage_bytes);
  __syncwarp();

  let_successor_start();
  if (args.expert_ids) wait_for_predecessor();  // which weights, it says
  const int token = blockIdx.y / args.n_used, slot = blockIdx.y % args.n_used;
  const size_t expert = args.expert_ids ? (size_t)args.expert_ids[(size_t)token * args.expert_stride + slot] : 0;
  const X x(shared + at_x, args.n_in);

  bool is_first = true;
  auto prepare_x = [&] {  // once, while the first weights are on their way
    if (!is_first) return;
    is_first = false;
    const float* row = args.x + (size_t)token * args.x_stride + (size_t)slot * args.x_expert_stride;
    x.fill(row, args.norm, args.n_row, args.k_begin, args.n_in, args.eps, partial);
    __syncthreads();
  };

  // `use` with the format of a matrix.
  auto with = [&](int which, auto use) {
    if (is_pair && (args.second >> which & 1)) {
      use(As<Second>{});
    } else {
      use(As<First>{});
    }
  };

  int tile = blockIdx.x;  // what is left of it is for the next matrix
#pragma unroll 1
  for (int which = 0; which < n_matrix; ++which) {
    int n;
    Cursor cursor;
    with(which, [&](auto format) {
      const Tiles<typename decltype(format)::type> tiles = {args, which};
      n = tiles.count();
      if (tile >= n) return;
      Reader<typename decltype(format)::type> reader = {tiles, expert, cursor};
      reader.seek(tile);
#pragma unroll 1
      for (int i = 0; i < args.stages; ++i) reader.fill(ring);
    });
    if (tile < n) {
      prepare_x();
      with(which, [&](auto format) {
        const Tiles<typename decltype(format)::type> tiles = {args, which};
        Reader<typename decltype(format)::type> reader = {tiles, expert, cursor};
        multiply(tiles, reader, tile, x, partial, ring);
      });
      ring.skip();      // what was filled beyond the end
      __syncthreads();  // `partial` begins anew
      tile += (n - tile + (int)gridDim.x - 1) / (int)gridDim.x * (int)gridDim.x;
    }
    tile -= n;
  }
}

}  // namespace reflex

#define REFLEX_MATVEC(NAME, FIRST, SECOND)                                \
  extern "C" __global__ void __launch_bounds__(reflex::matvec_threads, 2) \
      NAME(const __grid_constant__ reflex::MatvecArgs args) {             \
    reflex::matvec<reflex::FIRST, reflex::SECOND>(args);                  \
  }
