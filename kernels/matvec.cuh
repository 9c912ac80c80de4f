// Matrix-vector products: out = W x for one row x, up to four matrices W a launch.
//
// Quantised W: x becomes 16-bit integers q with one scale s per 16 elements, x = s q, |q| <= 127 * 256 + 127, each split
// into two signed bytes, q = 256 high + low. A run of 16 weights (dequant.cuh) then costs eight 4-way byte dot products,
// exact in 32-bit integers:
//   sum value * x = scale * s * (256 sum(level high) + sum(level low) - zero sum(q)) + offset * s * sum(q)
// and these are added up in float32. F32, F16, BF16: x stays float32, so do products and sums.
//
// Layout: a block of 8 warps works on tiles of rows. `split` of them (1, 2, 4, 8) share the columns of a tile: lane l of warp
// w takes pieces l + 32 (w + split i). Blocks take tiles blockIdx.x, + gridDim.x, ... through all matrices.
// Sums are formed in an order that only the shape determines.
//
// Launch: 256 threads; dynamic shared memory `Activation::bytes(n_in)`; blockIdx.y is a row of x (or one of a token's
// experts). x 16-byte aligned, strides multiples of 4 where W is quantised. The weights of the first tile are fetched
// into L2 before the predecessor is waited for: the upload of W must be complete when the predecessor starts.
#pragma once

#include "linear.cuh"

namespace reflex {

struct MatvecArgs {
  const float* x;          // (rows of x, x_stride)
  const float* norm;       // (n_row) RMSNorm weight, or null: x as it is
  const float* expert_ids; // (tokens, expert_stride), the first n_used of each are ids; or null
  int n_row;               // elements of a row of W and of x
  int k_begin, n_in;       // the columns of this launch: [k_begin, k_begin + n_in)
  int x_stride;            // from a token's x to the next one's
  int x_expert_stride;     // from the x of a token's expert to that of its next expert
  int expert_stride, n_used;  // of expert_ids; n_used is 1 without experts
  float eps;
  int n_matrix;
  int swiglu;              // out of matrix 0 is silu(W0 x) * (W1 x)
  int split_log2;
  int second;              // bit i: matrix i has the kernel's second format
  Matrix matrix[max_matrices];
};

constexpr int matvec_threads = 256;
constexpr int matvec_warps = 8;

// --- x in shared memory -----------------------------------------------------------------------------------------------

// Two byte planes, and per run of 16: scale and sum of q.
struct Planes {
  uint4* high;
  uint4* low;
  int2* meta;  // {scale as bits, sum}

  __device__ __forceinline__ Planes(uint8_t* shared, int n) {
    const int runs = n / 16;
    high = reinterpret_cast<uint4*>(shared);
    low = high + runs;
    meta = reinterpret_cast<int2*>(low + runs);
  }

  __device__ __forceinline__ void fill(const float* x, const float* norm, float factor, int n) {
    for (int run = threadIdx.x; run < n / 16; run += matvec_threads) {
      float v[16];
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float4 f = reinterpret_cast<const float4*>(x)[4 * run + i];
        if (norm) {
          const float* w = norm + 16 * run + 4 * i;
          f.x *= factor * __ldg(w), f.y *= factor * __ldg(w + 1), f.z *= factor * __ldg(w + 2), f.w *= factor * __ldg(w + 3);
        }
        v[4 * i] = f.x, v[4 * i + 1] = f.y, v[4 * i + 2] = f.z, v[4 * i + 3] = f.w;
        most = max(max(most, max(magnitude(f.x), magnitude(f.y))), max(magnitude(f.z), magnitude(f.w)));
      }
      // Below 1e-30 the reciprocal would overflow; such a run counts as 0. NaN and infinity live on in the scale.
      const float greatest = __uint_as_float(most);
      const float inverse = greatest < 1e-30f ? 0.0f : 32639.0f / greatest;
      int sum = 0;
      uint32_t high_words[4], low_words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t q[4], h[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int whole = __float2int_rn(v[4 * i + j] * inverse);
          sum += whole;
          q[j] = (uint32_t)whole;
          h[j] = (uint32_t)(whole + 128) >> 8;  // (whole - signed low byte) / 256
        }
        low_words[i] = permute(permute(q[0], q[1], 0x0040), permute(q[2], q[3], 0x0040), 0x5410);
        high_words[i] = permute(permute(h[0], h[1], 0x0040), permute(h[2], h[3], 0x0040), 0x5410);
      }
      high[run] = make_uint4(high_words[0], high_words[1], high_words[2], high_words[3]);
      low[run] = make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
      meta[run] = make_int2(__float_as_int(greatest * (1.0f / 32639.0f)), sum);
    }
  }
};

struct Plain {
  float* x;

  __device__ __forceinline__ Plain(uint8_t* shared, int) { x = reinterpret_cast<float*>(shared); }

  __device__ __forceinline__ void fill(const float* from, const float* norm, float factor, int n) {
    for (int i = threadIdx.x; i < (n + 7) / 8 * 8; i += matvec_threads) {
      float v = i < n ? from[i] : 0.0f;
      if (norm && i < n) v *= factor * __ldg(norm + i);
      x[i] = v;
    }
  }
};

// --- a piece of some rows times x -------------------------------------------------------------------------------------
// A tile is 4 rows of weights, or 2 where reading them takes many registers. A lane reads the same piece of every 32nd
// (64th, ..) block of each: `within` is its place in the block, `unit` counts the units of x (runs, or floats) before it.

template <class Format>
struct Quantised {
  using X = Planes;
  using Raw = typename Format::Raw;
  static constexpr int rows = rows_at_once<Format>;
  static constexpr int piece_elements = 16 * Format::runs;
  static constexpr int block_pieces = pieces<Format>, block_bytes = Format::bytes;
  static constexpr int unit_elements = 16, block_units = Format::elements / 16;

  static __device__ __forceinline__ Raw fetch(const uint8_t* block, int within, int, bool) { return Format::fetch(block, within); }

  static __device__ __forceinline__ void add(
      const Raw (&raw)[rows], int within, int unit, const X& x, float (&sum)[rows]) {
    uint4 high[Format::runs], low[Format::runs];
    float scale[Format::runs], total[Format::runs];
    int whole[Format::runs];
#pragma unroll
    for (int k = 0; k < Format::runs; ++k) {
      const int run = unit + Format::position(within, k) / 16;
      high[k] = x.high[run], low[k] = x.low[run];
      const int2 meta = x.meta[run];
      scale[k] = __int_as_float(meta.x);
      whole[k] = meta.y;
      total[k] = scale[k] * (float)meta.y;
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      Run run[Format::runs];
      Format::decode(raw[r], within, run);
#pragma unroll
      for (int k = 0; k < Format::runs; ++k) {
        int dot = __dp4a((int)run[k].q[0], (int)high[k].x, 0);
        dot = __dp4a((int)run[k].q[1], (int)high[k].y, dot);
        dot = __dp4a((int)run[k].q[2], (int)high[k].z, dot);
        dot = __dp4a((int)run[k].q[3], (int)high[k].w, dot);
        dot = __dp4a((int)run[k].q[0], (int)low[k].x, dot << 8);
        dot = __dp4a((int)run[k].q[1], (int)low[k].y, dot);
        dot = __dp4a((int)run[k].q[2], (int)low[k].z, dot);
        dot = __dp4a((int)run[k].q[3], (int)low[k].w, dot);
        if constexpr (Format::zero != 0) dot -= Format::zero * whole[k];
        sum[r] = fmaf(run[k].scale * scale[k], (float)dot, sum[r]);
        if constexpr (Format::has_offset) sum[r] = fmaf(run[k].offset, total[k], sum[r]);
      }
    }
  }
};

template <class Format>
struct Floating {
  using X = Plain;
  using Raw = Words<4, 16>;
  static constexpr int rows = 4;
  static constexpr int piece_elements = 16 / Format::bytes;
  static constexpr int block_pieces = 1, block_bytes = 16, unit_elements = 1, block_units = piece_elements;

  // `left` elements of the row begin at `block`.
  static __device__ __forceinline__ Raw fetch(const uint8_t* block, int, int left, bool aligned) {
    Raw raw;
    load_floats<Format>(block, left, aligned, raw);
    return raw;
  }

  static __device__ __forceinline__ void add(
      const Raw (&raw)[rows], int, int unit, const X& x, float (&sum)[rows]) {
    float v[piece_elements];
#pragma unroll
    for (int i = 0; i < piece_elements; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(x.x + unit + i);
      v[i] = f.x, v[i + 1] = f.y, v[i + 2] = f.z, v[i + 3] = f.w;
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int i = 0; i < piece_elements; ++i) {
        const uint32_t bits = Format::bytes == 4 ? raw[r][i % 4] : raw[r][i / 2 % 4] >> 16 * (i & 1) & 0xffff;
        sum[r] = fmaf(Format::element(bits), v[i], sum[r]);
      }
    }
  }
};

template <class Format, bool floats = is_float<Format>>
struct Choose {
  using type = Quantised<Format>;
};
template <class Format>
struct Choose<Format, true> {
  using type = Floating<Format>;
};
template <class Format>
using Product = typename Choose<Format>::type;

// --- tiles ------------------------------------------------------------------------------------------------------------

// Sums over the lanes: lanes 32 / N * r and up end with the sum of v[r].
template <int N>
__device__ __forceinline__ float sum_lanes(const float (&v)[N]) {
  constexpr uint32_t all = 0xffffffffu;
  const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
  float s;
  if constexpr (N == 4) {
    const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(all, upper ? v[0] : v[2], 16);
    const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(all, upper ? v[1] : v[3], 16);
    s = (odd ? b : a) + __shfl_xor_sync(all, odd ? a : b, 8);
  } else {
    static_assert(N == 2, "");
    s = (upper ? v[1] : v[0]) + __shfl_xor_sync(all, upper ? v[0] : v[1], 16);
    s += __shfl_xor_sync(all, s, 8);
  }
  s += __shfl_xor_sync(all, s, 4);
  s += __shfl_xor_sync(all, s, 2);
  return s + __shfl_xor_sync(all, s, 1);
}

// A matrix, or gate and up, cut into tiles.
struct Tiles {
  const Matrix* gate;  // of the first half of a tile's rows; where there is no SwiGLU, of all
  const Matrix* up;
  int yield;           // rows of the output from a tile
  int groups;          // tiles a block works on at once
  size_t stride;       // bytes of a row

  template <class Format>
  static __device__ __forceinline__ Tiles of(const MatvecArgs& args, int i) {
    const int yield = args.swiglu ? Product<Format>::rows / 2 : Product<Format>::rows;
    return {&args.matrix[i], &args.matrix[args.swiglu ? 1 : i], yield, matvec_warps >> args.split_log2, row_bytes<Format>(args.n_row)};
  }

  __device__ __forceinline__ int count() const { return (gate->n_out + yield * groups - 1) / (yield * groups); }
};

template <class Format>
__device__ __forceinline__ void multiply(
    const MatvecArgs& args, const Tiles& tiles, size_t expert, int tile, const typename Product<Format>::X& x, float* partial) {
  using P = Product<Format>;
  constexpr int rows = P::rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = 1 << args.split_log2;
  const int part = warp & (split - 1), group = warp >> args.split_log2;
  const int n_tiles = tiles.count();
  const int n_pieces = (args.n_in + P::piece_elements - 1) / P::piece_elements;
  const int hop = 32 << args.split_log2;  // pieces to the next step's
  const int steps = (n_pieces + hop - 1) / hop;
  const bool aligned = tiles.stride % 16 == 0;
  const int start = lane + 32 * part, within = start % P::block_pieces;
  const int n_units = args.n_in / P::unit_elements, first_unit = start / P::block_pieces * P::block_units;
  const uint8_t* row[rows];               // where the next fetch reads,
  int ahead = tile, left = n_pieces - start;  // its tile, and the pieces of a row from there on

  auto seek = [&] {
    const size_t offset = expert * tiles.gate->expert_bytes + row_bytes<Format>(args.k_begin) + start / P::block_pieces * P::block_bytes;
    const int first = (ahead * tiles.groups + group) * tiles.yield, last = tiles.gate->n_out - 1;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const bool second = r >= tiles.yield;
      row[r] = (second ? tiles.up : tiles.gate)->weight + offset + (size_t)min(first + (second ? r - tiles.yield : r), last) * tiles.stride;
    }
  };
  typename P::Raw next[rows];
  auto fetch = [&] {
    if (left > 0) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        next[r] = P::fetch(row[r], within, args.n_in - (n_pieces - left) * P::piece_elements, aligned);
        row[r] += hop / P::block_pieces * P::block_bytes;
      }
    }
    left -= hop;
  };

  seek();
  fetch();
  int step = 0, parity = 0, unit = first_unit;
  float sum[rows] = {};
#pragma unroll 1
  while (tile < n_tiles) {
    typename P::Raw raw[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) raw[r] = next[r];
    if (++step == steps) {
      ahead += gridDim.x;
      left = ahead < n_tiles ? n_pieces - start : 0;
      seek();
    }
    fetch();
    if (unit < n_units) P::add(raw, within, unit, x, sum);
    unit += hop / P::block_pieces * P::block_units;
    if (step < steps) continue;

    const float s = sum_lanes(sum);
    float* mine = partial + (parity * matvec_warps + warp) * rows;
    if (lane % (32 / rows) == 0) mine[lane / (32 / rows)] = s;
    if (split > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    const int to = (tile * tiles.groups + group) * tiles.yield + lane;
    if (part == 0 && lane < tiles.yield && to < tiles.gate->n_out) {
      float v = 0;
#pragma unroll 1
      for (int p = 0; p < split; ++p) v += mine[p * rows + lane];
      if (tiles.gate->bias) v += tiles.gate->bias[to];
      if (args.swiglu) {
        float up = 0;
#pragma unroll 1
        for (int p = 0; p < split; ++p) up += mine[p * rows + tiles.yield + lane];
        if (tiles.up->bias) up += tiles.up->bias[to];
        v = silu(v) * up;
      }
      const size_t at = (size_t)blockIdx.y * tiles.gate->out_stride + to;
      if (tiles.gate->residual) v += tiles.gate->residual[at];
      tiles.gate->out[at] = v;
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) sum[r] = 0;
    step = 0;
    unit = first_unit;
    parity ^= 1;
    tile += gridDim.x;
  }
}

// Bring a block's first tile into L2: its rows lie side by side.
__device__ __forceinline__ void prefetch(const MatvecArgs& args, const Tiles& tiles, int tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = 1 << args.split_log2;
  const int first = (tile * tiles.groups + (warp >> args.split_log2)) * tiles.yield;
  const size_t length = (size_t)max(0, min(tiles.yield, tiles.gate->n_out - first)) * tiles.stride;
  const size_t step = 32 * 128 * split;
#pragma unroll 1
  for (int side = 0; side <= args.swiglu; ++side) {
    const uint8_t* from = (side ? tiles.up : tiles.gate)->weight + (size_t)first * tiles.stride;
#pragma unroll 1
    for (size_t at = 128 * (lane + 32 * (warp & (split - 1))); at < min(length, 16 * step); at += step) prefetch_l2(from + at);
  }
}

template <class First, class Second>
__device__ __forceinline__ void matvec(const MatvecArgs& args) {
  static_assert(is_float<First> == is_float<Second>, "they share x");
  constexpr bool is_pair = !is_same<First, Second>::value;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ float partial[2 * matvec_warps * 4];
  const int n_matrix = args.swiglu ? 1 : args.n_matrix;
  auto tiles_of = [&](int i) {
    return is_pair && (args.second >> i & 1) ? Tiles::of<Second>(args, i) : Tiles::of<First>(args, i);
  };

  let_successor_start();
  if (!args.expert_ids) {  // while x is still being computed
    int tile = blockIdx.x, i = 0;
    while (i < n_matrix - 1 && tile >= tiles_of(i).count()) tile -= tiles_of(i++).count();
    prefetch(args, tiles_of(i), tile);
  }
  wait_for_predecessor();

  const int token = blockIdx.y / args.n_used, slot = blockIdx.y % args.n_used;
  const float* x = args.x + (size_t)token * args.x_stride + (size_t)slot * args.x_expert_stride;
  const size_t expert = args.expert_ids ? (size_t)args.expert_ids[(size_t)token * args.expert_stride + slot] : 0;
  const float factor = args.norm ? inverse_rms<matvec_threads>(x, args.n_row, args.eps, partial) : 1.0f;
  typename Product<First>::X planes(shared, args.n_in);
  planes.fill(x + args.k_begin, args.norm ? args.norm + args.k_begin : nullptr, factor, args.n_in);
  __syncthreads();

  int tile = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < n_matrix; ++i) {
    const Tiles tiles = tiles_of(i);
    const int n = tiles.count();
    if (tile < n) {
      if constexpr (is_pair) {
        if (args.second >> i & 1) {
          multiply<Second>(args, tiles, expert, tile, planes, partial);
        } else {
          multiply<First>(args, tiles, expert, tile, planes, partial);
        }
      } else {
        multiply<First>(args, tiles, expert, tile, planes, partial);
      }
      tile += (n - tile + (int)gridDim.x - 1) / (int)gridDim.x * (int)gridDim.x;
      __syncthreads();  // `partial` begins anew
    }
    tile -= n;
  }
}

}  // namespace reflex

#define REFLEX_MATVEC(NAME, FIRST, SECOND)                                                                           \
  extern "C" __global__ void __launch_bounds__(reflex::matvec_threads, 2) NAME(const __grid_constant__ reflex::MatvecArgs args) { \
    reflex::matvec<reflex::FIRST, reflex::SECOND>(args);                                                             \
  }
