// Matrix-vector products: out = W x for one row x, up to four matrices W a launch.
//
// Quantised W: x becomes 16-bit integers q with one scale s per 32 elements, x = s q, |q| <= 127 * 256 + 127, each split
// into two signed bytes, q = 256 high + low. A group of 16 or 32 weights (dequant.cuh) then costs 4-way byte dot products,
// exact in 32-bit integers:
//   sum value * x = scale * s * (256 sum(level high) + sum(level low) - zero sum(q)) + offset * s * sum(q)
// and these are added up in float32. F32, F16, BF16: x stays float32, so do products and sums.
//
// Layout: a tile is 2 or 4 rows of W. `lanes` threads of a block (8 .. 256, a power of two) share one: lane l of them takes
// pieces l, l + lanes, ... of each row. Blocks take tiles blockIdx.x, + gridDim.x, ... through all matrices; the tile after
// next is on its way into L2 meanwhile. Sums are formed in an order that only the shape determines.
//
// Launch: 256 threads; dynamic shared memory as `linear.py` computes it; blockIdx.y is a row of x (or one of a token's
// experts). x 16-byte aligned, strides multiples of 4 where W is quantised. The first tiles are prefetched before the
// predecessor is waited for: the upload of W must be complete when the predecessor starts.
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
  int lanes_log2;
  int second;              // bit i: matrix i has the kernel's second format
  Matrix matrix[max_matrices];
};

constexpr int matvec_threads = 256;
constexpr int matvec_partials = 2 * 128;  // floats of shared memory for sums on their way from lane to lane

// --- x in shared memory -----------------------------------------------------------------------------------------------

// Two byte planes in units of 16 elements, and 16 bytes of facts about every 32.
struct Planes {
  uint8_t* high;
  uint8_t* low;
  uint8_t* facts;  // float scale, int sum of q of the first 16, of the second, float scale * both

  __device__ __forceinline__ Planes(uint8_t* shared, int n) {
    const int units = (n + 127) / 128 * 8;
    high = shared;
    low = high + 16 * units;
    facts = low + 16 * units;
  }

  // Byte offset of unit u in a plane: the lanes of a warp read at strides of 1, 2, 4 and 8 units and must not meet in a
  // bank. 32 units further it is 512 bytes further.
  static __device__ __forceinline__ int place(int u) {
    const int line = u >> 3 & 3;
    return (u ^ line ^ line << 1) * 16;
  }

  __device__ __forceinline__ void fill(const float* x, const float* norm, float factor, int n) {
    for (int base = 0; base < n / 16; base += matvec_threads) {  // in step: neighbours share a scale
      const int unit = base + threadIdx.x;
      const bool there = unit < n / 16;
      float v[16] = {};
      uint32_t most = 0;
      if (there) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float4 f = reinterpret_cast<const float4*>(x)[4 * unit + i];
          if (norm) {
            const float* w = norm + 16 * unit + 4 * i;
            f.x *= factor * __ldg(w), f.y *= factor * __ldg(w + 1), f.z *= factor * __ldg(w + 2), f.w *= factor * __ldg(w + 3);
          }
          v[4 * i] = f.x, v[4 * i + 1] = f.y, v[4 * i + 2] = f.z, v[4 * i + 3] = f.w;
          most = max(max(most, max(magnitude(f.x), magnitude(f.y))), max(magnitude(f.z), magnitude(f.w)));
        }
      }
      most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
      // Below 1e-30 the reciprocal would overflow; such a group counts as 0. NaN and infinity live on in the scale.
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
      const int other = __shfl_xor_sync(0xffffffffu, sum, 1);
      if (there) {
        const int at = place(unit);
        *reinterpret_cast<uint4*>(high + at) = make_uint4(high_words[0], high_words[1], high_words[2], high_words[3]);
        *reinterpret_cast<uint4*>(low + at) = make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
        const float scale = greatest * (1.0f / 32639.0f);
        const int4 all = {__float_as_int(scale), sum, other, __float_as_int(scale * (float)(sum + other))};
        if (unit % 2 == 0) *reinterpret_cast<int4*>(facts + unit / 2 * 16) = all;
      }
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
// A lane reads the same piece of every so manieth block of each row, `within` its place in the block. `Places` is where
// the x that goes with it is in the first of these blocks.

template <class Format>
struct Quantised {
  using X = Planes;
  using Raw = typename Format::Raw;
  static constexpr int rows = rows_at_once<Format>, runs = Format::runs, group = Format::group;
  static constexpr int piece_elements = 16 * runs;
  static constexpr int block_pieces = pieces<Format>, block_bytes = Format::bytes;
  static constexpr int unit_elements = 16, block_units = Format::elements / 16;

  struct Places {
    int run[runs];           // in the planes
    int facts[runs / group];
    bool odd;                // are the runs the second halves of their 32? (group 1)
  };
  static __device__ __forceinline__ Places places(int within, int unit) {
    Places at;
#pragma unroll
    for (int k = 0; k < runs; ++k) {
      const int u = unit + Format::position(within, k) / 16;
      at.run[k] = Planes::place(u);
      at.facts[k / group] = u / 2 * 16;
    }
    at.odd = group == 1 && (unit + Format::position(within, 0) / 16) % 2;
    return at;
  }

  static __device__ __forceinline__ Raw fetch(const uint8_t* block, int within, int, bool) { return Format::fetch(block, within); }

  // Four bytes of levels times four of x.
  static __device__ __forceinline__ int dot(uint32_t q, uint32_t x, int sum) {
    int out;
    if constexpr (Format::is_signed) {
      asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(q), "r"(x), "r"(sum));
    } else {
      asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(q), "r"(x), "r"(sum));
    }
    return out;
  }
  static __device__ __forceinline__ int dot(const uint32_t (&q)[4], const uint4& x, int sum) {
    return dot(q[3], x.w, dot(q[2], x.z, dot(q[1], x.y, dot(q[0], x.x, sum))));
  }

  static __device__ __forceinline__ void add(
      const Raw (&raw)[rows], int within, const X& x, const Places& at, int unit, float (&sum)[rows]) {
    RunsOf<Format> w[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) Format::decode(raw[r], within, w[r]);
    const uint8_t* plane = x.high + 16 * unit;
    const uint8_t* low_plane = x.low + 16 * unit;
#pragma unroll
    for (int j = 0; j < runs / group; ++j) {
      uint4 high[group], low[group];
#pragma unroll
      for (int k = 0; k < group; ++k) {
        high[k] = *reinterpret_cast<const uint4*>(plane + at.run[j * group + k]);
        low[k] = *reinterpret_cast<const uint4*>(low_plane + at.run[j * group + k]);
      }
      const int4 facts = *reinterpret_cast<const int4*>(x.facts + 8 * unit + at.facts[j]);
      const float scale = __int_as_float(facts.x);
      const int whole = group == 2 ? facts.y + facts.z : at.odd ? facts.z : facts.y;
      const float total = group == 2 ? __int_as_float(facts.w) : scale * (float)whole;
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        int d = 0;
        if constexpr (group == 1 || Format::shift(0) == Format::shift(1)) {
#pragma unroll
          for (int k = 0; k < group; ++k) d = dot(w[r].q[j * group + k], high[k], d);
          d <<= 8;
#pragma unroll
          for (int k = 0; k < group; ++k) d = dot(w[r].q[j * group + k], low[k], d);
          d >>= Format::shift(j * group);
        } else {
#pragma unroll
          for (int k = 0; k < group; ++k) {
            d += dot(w[r].q[k], low[k], dot(w[r].q[k], high[k], 0) << 8) >> Format::shift(k);
          }
        }
        if constexpr (Format::zero != 0) d -= Format::zero * whole;
        sum[r] = fmaf(w[r].scale[j] * scale, (float)d, sum[r]);
        if constexpr (Format::has_offset) sum[r] = fmaf(w[r].offset[j], total, sum[r]);
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

  struct Places {
    int first;
  };
  static __device__ __forceinline__ Places places(int, int unit) { return {unit}; }

  // `left` elements of the row begin at `block`.
  static __device__ __forceinline__ Raw fetch(const uint8_t* block, int, int left, bool aligned) {
    Raw raw;
    load_floats<Format>(block, left, aligned, raw);
    return raw;
  }

  static __device__ __forceinline__ void add(
      const Raw (&raw)[rows], int, const X& x, const Places& at, int unit, float (&sum)[rows]) {
    float v[piece_elements];
#pragma unroll
    for (int i = 0; i < piece_elements; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(x.x + at.first + unit + i);
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

// A matrix, or gate and up, cut into tiles.
struct Tiles {
  const Matrix* gate;  // of the first half of a tile's rows; where there is no SwiGLU, of all
  const Matrix* up;
  int yield;           // rows of the output from a tile
  int at_once;         // rows of the output that a block works on at once
  size_t stride;       // bytes of a row

  template <class Format>
  static __device__ __forceinline__ Tiles of(const MatvecArgs& args, int i) {
    const int yield = args.swiglu ? Product<Format>::rows / 2 : Product<Format>::rows;
    return {&args.matrix[i], &args.matrix[args.swiglu ? 1 : i], yield, yield * matvec_threads >> args.lanes_log2,
            row_bytes<Format>(args.n_row)};
  }

  // Blocks' worth of tiles.
  __device__ __forceinline__ int count() const { return (gate->n_out + at_once - 1) / at_once; }
};

// The block's tiles of one matrix, from `tile` on; `ahead(n)` prefetches the tile n behind the first of the matrix.
template <class Format, class Ahead>
__device__ __forceinline__ void multiply(
    const MatvecArgs& args, const Tiles& tiles, size_t expert, int tile, const typename Product<Format>::X& x, float* partial, Ahead ahead) {
  using P = Product<Format>;
  constexpr int rows = P::rows;
  const int lanes = 1 << args.lanes_log2, width = min(lanes, 32);
  const int start = threadIdx.x & (lanes - 1), group = threadIdx.x >> args.lanes_log2;
  const int n_tiles = tiles.count();
  const int n_pieces = (args.n_in + P::piece_elements - 1) / P::piece_elements;
  const int steps = (n_pieces + lanes - 1) / lanes;
  const bool aligned = tiles.stride % 16 == 0;
  const int within = start % P::block_pieces;
  const int hop_bytes = lanes / P::block_pieces * P::block_bytes, hop_units = lanes / P::block_pieces * P::block_units;
  const int first_unit = start / P::block_pieces * P::block_units, n_units = args.n_in / P::unit_elements - first_unit;
  const typename P::Places places = P::places(within, first_unit);
  const size_t offset = expert * tiles.gate->expert_bytes + row_bytes<Format>(args.k_begin) + start / P::block_pieces * P::block_bytes;

#pragma unroll 1
  for (int parity = 0; tile < n_tiles; tile += gridDim.x, parity ^= 1) {
    ahead(tile + (int)gridDim.x);
    const int first = tile * tiles.at_once + group * tiles.yield, last = tiles.gate->n_out - 1;
    const uint8_t* row[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const bool second = r >= tiles.yield;
      row[r] = (second ? tiles.up : tiles.gate)->weight + offset + (size_t)min(first + (second ? r - tiles.yield : r), last) * tiles.stride;
    }
    float sum[rows] = {};
    int unit = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (unit < n_units) {
        typename P::Raw raw[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) raw[r] = P::fetch(row[r], within, n_units - unit, aligned);
        P::add(raw, within, x, places, unit, sum);
      }
#pragma unroll
      for (int r = 0; r < rows; ++r) row[r] += hop_bytes;
      unit += hop_units;
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
    const int to = first + start;
    if (start < tiles.yield && to <= last) {
      const int parts = lanes / width;
      float v = 0;
#pragma unroll 1
      for (int p = 0; p < parts; ++p) v += mine[p * rows + start];
      if (tiles.gate->bias) v += tiles.gate->bias[to];
      if (args.swiglu) {
        float up = 0;
#pragma unroll 1
        for (int p = 0; p < parts; ++p) up += mine[p * rows + tiles.yield + start];
        if (tiles.up->bias) up += tiles.up->bias[to];
        v = silu(v) * up;
      }
      const size_t at = (size_t)blockIdx.y * tiles.gate->out_stride + to;
      if (tiles.gate->residual) v += tiles.gate->residual[at];
      tiles.gate->out[at] = v;
    }
  }
}

template <class First, class Second>
__device__ __forceinline__ void matvec(const MatvecArgs& args) {
  static_assert(is_float<First> == is_float<Second>, "they share x");
  constexpr bool is_pair = !is_same<First, Second>::value;
  extern __shared__ __align__(16) uint8_t shared[];
  float* partial = reinterpret_cast<float*>(shared);
  const int n_matrix = args.swiglu ? 1 : args.n_matrix;
  auto tiles_of = [&](int i) {
    return is_pair && (args.second >> i & 1) ? Tiles::of<Second>(args, i) : Tiles::of<First>(args, i);
  };
  // The rows of a block's tile lie side by side: each warp fetches an eighth of them.
  auto prefetch_tile = [&](int tile) {
#pragma unroll 1
    for (int i = 0; i < n_matrix; ++i) {
      const Tiles tiles = tiles_of(i);
      const int n = tiles.count();
      if (tile < n) {
        const int first = tile * tiles.at_once, count = min(tiles.at_once, tiles.gate->n_out - first);
        const size_t length = count * tiles.stride, share = (length / (matvec_threads / 32) + 15) & ~(size_t)15;
        const size_t begin = threadIdx.x / 32 * share;
        if (begin < length) {
          const size_t offset = first * tiles.stride + begin;
          prefetch(tiles.gate->weight + offset, min(share, length - begin));
          if (args.swiglu) prefetch(tiles.up->weight + offset, min(share, length - begin));
        }
        return;
      }
      tile -= n;
    }
  };

  let_successor_start();
  if (!args.expert_ids) prefetch_tile(blockIdx.x);  // while x is still being computed
  wait_for_predecessor();

  const int token = blockIdx.y / args.n_used, slot = blockIdx.y % args.n_used;
  const float* x = args.x + (size_t)token * args.x_stride + (size_t)slot * args.x_expert_stride;
  const size_t expert = args.expert_ids ? (size_t)args.expert_ids[(size_t)token * args.expert_stride + slot] : 0;
  const float factor = args.norm ? inverse_rms<matvec_threads>(x, args.n_row, args.eps, partial) : 1.0f;
  typename Product<First>::X planes(shared + matvec_partials * sizeof(float), args.n_in);
  planes.fill(x + args.k_begin, args.norm ? args.norm + args.k_begin : nullptr, factor, args.n_in);
  __syncthreads();

  int tile = blockIdx.x, before = 0;
  auto ahead = [&](int n) {
    if (!args.expert_ids) prefetch_tile(before + n);
  };
#pragma unroll 1
  for (int i = 0; i < n_matrix; ++i) {
    const Tiles tiles = tiles_of(i);
    const int n = tiles.count();
    if (tile < n) {
      if constexpr (is_pair) {
        if (args.second >> i & 1) {
          multiply<Second>(args, tiles, expert, tile, planes, partial, ahead);
        } else {
          multiply<First>(args, tiles, expert, tile, planes, partial, ahead);
        }
      } else {
        multiply<First>(args, tiles, expert, tile, planes, partial, ahead);
      }
      tile += (n - tile + (int)gridDim.x - 1) / (int)gridDim.x * (int)gridDim.x;
      __syncthreads();  // `partial` begins anew
    }
    tile -= n;
    before += n;
  }
}

}  // namespace reflex

#ifndef MATVEC_BLOCKS
#define MATVEC_BLOCKS 2
#endif
#define REFLEX_MATVEC(NAME, FIRST, SECOND)                                                                           \
  extern "C" __global__ void __launch_bounds__(reflex::matvec_threads, MATVEC_BLOCKS) NAME(const __grid_constant__ reflex::MatvecArgs args) { \
    reflex::matvec<reflex::FIRST, reflex::SECOND>(args);                                                             \
  }
