// Experts for many tokens: out[s] = W[expert of s] x[s] for slots s (a token's choices, one after the other), which
// `group_experts` (experts.cu) has put in order of their experts and cut into tiles of one expert each. So weights are
// read and dequantised once a tile, on tensor cores, without the host knowing who was chosen.
//
// The arithmetic is that of matmul.cuh: a warp multiplies 16 rows of W with the rows of x of a tile, weights dequantised
// on the way into registers. But since a router may depend on the result, x and weights that halves lose something of
// come as two halves, what fits one and the rest: x W + rest x W + x rest W, of which at most 2^-22 is lost.
//
// As in few.cuh, x and W go through stages in shared memory that are filled while earlier ones are multiplied: all warps
// of a block share x, of which rows are gathered, 64 bytes or more of each at a time. A stage has a place for every 8
// columns of x, first the high halves of all, then what they lose. Places are an odd number of 16 bytes apart, the two
// that a lane needs at a time are neighbours, then come those of the other lanes of its row: so neither copies nor reads
// meet in a bank.
//
// Of a tile that is not full only as many slots are multiplied as there are, 16 at a time.
//
// Layout: blockIdx.x is 16 rows of W a warp (with `up`: 8 rows of gate and the same 8 of up), blockIdx.y a tile; blocks
// of tiles beyond the last return. Launch: 32 threads a warp, up to `grouped_threads`; dynamic shared memory two stages.
#pragma once

#include "stage.cuh"

namespace reflex {

struct GroupedArgs {
  const uint4* x;         // halves (rows, 2, n_padded), n_padded the next multiple of 256 of n_in
  const float* x_scale;   // (rows)
  const int4* tiles;      // expert, first place in `slots`, number of slots (0: there is no such tile)
  const int* slots;       // in order of their experts
  const uint8_t* weight;  // of expert 0
  const uint8_t* up;      // null: out = W x; else W is a gate: out = silu(W x) * (up x)
  uint64_t expert_bytes;  // from one expert's matrix to the next
  float* out;             // (slots, n_out)
  int share;              // slots that have a row of x in common
  int n_in, n_out;
  int width;  // most slots of a tile: 16 .. grouped_width, a multiple of 16
};

constexpr int grouped_threads = 384;
constexpr int grouped_width = 64;

// A power of two that is 2^-14 of one above the number with these magnitude bits: weights divided by it are below 2^14,
// so that the rest of what is not far below the greatest is no tiny half.
__device__ __forceinline__ float power_below(uint32_t bits) {
  return __uint_as_float(max(__float_as_uint(power_above(bits)), 15u << 23) - (14u << 23));
}

// A run times `inverse`, and the rest.
template <class Format>
__device__ __forceinline__ void split(const typename Operand<Format>::Parts& parts, int run, float inverse,
                                      uint32_t (&h)[8], uint32_t (&rest)[8]) {
  const uint32_t bias = (0x6400 + (Format::is_signed ? 128 : Format::zero << Format::shift(run))) * 0x10001;
  const float s = parts.scale[run / Format::group] * inverse * (1.0f / (1 << Format::shift(run)));
  const float o = parts.offset[run / Format::group] * inverse;
  const uint32_t scale = pack_halves(s, s), least = pack_halves(s - half_bits(scale), s - half_bits(scale));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // A byte b under 0x64 is the half 1024 + b: exact, and so is the difference.
    const uint32_t word = Format::is_signed ? parts.q[run][i / 2] ^ 0x80808080 : parts.q[run][i / 2];
    const uint32_t q = subtract_halves(permute(word, 0x64646464, i % 2 ? 0x4342 : 0x4140), bias);
    if constexpr (Format::has_offset) {
      const float a = fmaf(half_bits(q), s, o), b = fmaf(half_bits(q >> 16), s, o);
      h[i] = pack_halves(a, b);
      rest[i] = pack_halves(a - half_bits(h[i]), b - half_bits(h[i] >> 16));
    } else {
      h[i] = multiply_halves(q, scale);
      rest[i] = fma_halves(q, least, fma_halves(q, scale, h[i] ^ 0x80008000));  // what the product lost is a half
    }
  }
}

template <class Format>
__device__ __forceinline__ void grouped(const GroupedArgs& args) {
  using W = Operand<Format>;
  using S = Stage<Format, grouped_width>;  // but for x
  constexpr int N = grouped_width, places = S::columns / 8;
  static_assert(places == 16 || places == 32, "lanes of a warp copy one or two rows of x");
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int its_slot[N], its_row[N];  // of a place in the tile: its slot, and where the slot's row of x begins
  __shared__ float its_scale[N];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const int yield = args.up ? 8 : 16, first = (blockIdx.x * warps + warp) * yield, last = args.n_out - 1;
  const int bytes = (int)row_bytes<Format>(args.n_in);
  const bool aligned = bytes % 16 == 0;

  wait_for_predecessor();
  const int4 tile = args.tiles[blockIdx.y];
  const int count = tile.z;
  if (!count) return;
  const size_t expert = tile.x * args.expert_bytes;
  const uint8_t* row0 = args.weight + expert + (size_t)min(first + g, last) * bytes;
  const uint8_t* row1 = args.up ? args.up + expert + (size_t)min(first + g, last) * bytes
                                : args.weight + expert + (size_t)min(first + g + 8, last) * bytes;
  const int end = (args.n_in + S::columns - 1) / S::columns;
  const int plane = (args.n_in + 255) / 256 * 32;  // of x in memory, in units of 8 columns
  const int place = 16 * (args.width + 1), x_plane = places * place;
  const uint32_t base = shared_address(shared), stage_bytes = 2 * x_plane + warps * 16 * S::slot;
  const uint32_t own = 2 * x_plane + (warp * 16 + g) * S::slot;  // row g of this warp in a stage

  auto copy_w = [&](int stage) {
    const uint32_t to = base + stage % 2 * stage_bytes + own + 16 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* from = (r ? row1 : row0) + (size_t)stage * S::bytes;
      const int early = S::alike ? 0 : (int)(reinterpret_cast<uintptr_t>(from) & 15);
      const int there = early + min(S::bytes, bytes - stage * S::bytes) - 16 * t;
      from += 16 * t - early;
#pragma unroll
      for (int i = 0; i < (S::chunks + 3) / 4; ++i) {
        if (64 * i < there) copy16(to + r * 8 * S::slot + 64 * i, from + 64 * i, true);
      }
    }
  };
  // Lane p copies what belongs to place p; p % 8 is a lane's t and which of its two, p / 8 a run of its piece.
  const int its_place = lane % places, its_piece = its_place / (8 * W::runs) * 4 + its_place / 2 % 4;
  const int its_column = its_piece / W::block_pieces * W::block_elements +
                         W::position(its_piece % W::block_pieces, its_place / 8 % W::runs) + lane % 2 * 8;
  const uint4* x = args.x + its_column / 8;
  auto copy_x = [&](int stage) {
    const uint32_t to = base + stage % 2 * stage_bytes + its_place * place;
#pragma unroll 2
    for (int i = warp * (32 / places) + lane / places; i < 2 * count; i += warps * (32 / places)) {
      const int s = i / 2, rest = i % 2;
      copy16(to + rest * x_plane + 16 * s, x + its_row[s] + rest * plane + stage * places, true);
    }
  };

  copy_w(0);
#pragma unroll 1
  for (int s = threadIdx.x; s < count; s += blockDim.x) {
    const int slot = args.slots[tile.y + s], row = slot / args.share;
    its_slot[s] = slot, its_row[s] = row * 2 * plane, its_scale[s] = args.x_scale[row];
  }
  let_successor_start();
  __syncthreads();
  copy_x(0);
  commit_copies();

  float sum[N / 8][4] = {};
#pragma unroll 1
  for (int stage = 0; stage < end; ++stage) {
    // This stage's copies have arrived for every thread, and everyone is done with the one that is filled next.
    wait_copies<0>();
    __syncthreads();
    if (stage + 1 < end) {
      copy_w(stage + 1);
      copy_x(stage + 1);
    }
    commit_copies();

    const uint32_t w0 = base + stage % 2 * stage_bytes + own, w1 = w0 + 8 * S::slot;
    const uint32_t early0 = S::alike ? 0 : (low_bits(row0) + (uint32_t)stage * S::bytes) & 15;
    const uint32_t early1 = S::alike ? 0 : (low_bits(row1) + (uint32_t)stage * S::bytes) & 15;
    const uint8_t* x_stage = shared + stage % 2 * stage_bytes + 2 * t * place + 16 * g;
    const int left = args.n_in - stage * S::columns;
#pragma unroll 1
    for (int slice = 0; slice < S::slices; ++slice) {
      const int piece = 4 * slice + t, within = piece % W::block_pieces;
      typename W::Parts a0, a1;
      {
        typename W::Raw raw0 = {}, raw1 = {};
        if (16 * W::runs * piece < left) {
          const int at = piece / W::block_pieces, rest = left - at * W::block_elements;
          raw0 = W::fetch(SharedBytes{w0 + early0 + at * W::block_bytes}, within, rest, aligned);
          raw1 = W::fetch(SharedBytes{w1 + early1 + at * W::block_bytes}, within, rest, aligned);
        }
        W::unpack(raw0, within, a0);
        W::unpack(raw1, within, a1);
      }
      const uint8_t* x_slice = x_stage + slice * (8 * W::runs) * place;
#pragma unroll
      for (int k = 0; k < W::runs; ++k) {
        float power0 = 1, power1 = 1, inverse0 = 1, inverse1 = 1;
        if constexpr (W::is_scaled) {
          // The upper halves of what bounds both rows in a word: a power of two depends on no more.
          uint32_t both = permute(W::bound(a0, k), W::bound(a1, k), 0x7632);
          both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, 1));
          both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, 2));
          power0 = power_below(both << 16), power1 = power_below(both & 0xffff0000u);
          inverse0 = reciprocal_of_power(power0), inverse1 = reciprocal_of_power(power1);
        }
        uint32_t h0[8], h1[8], low0[8], low1[8];
        if constexpr (W::is_lossless) {
          W::to_half(a0, k, inverse0, h0);
          W::to_half(a1, k, inverse1, h1);
        } else {
          split<Format>(a0, k, inverse0, h0, low0);
          split<Format>(a1, k, inverse1, h1, low1);
#pragma unroll
          for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(low0[i]), "+r"(low1[i]));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(h0[i]), "+r"(h1[i]));  // here, not earlier: registers are dear
        // Two products side by side: one alone would wait for itself.
#pragma unroll
        for (int n = 0; n < N / 8; n += 2) {
          if (8 * n >= count) break;
          float c[2][4] = {};
          auto multiply = [&](const uint32_t(&a)[8], const uint32_t(&b)[8], int q, const uint4(&y)[2]) {
            mma(c[0], {a[q], b[q], a[q + 1], b[q + 1]}, y[0].x, y[0].y);
            mma(c[1], {a[q], b[q], a[q + 1], b[q + 1]}, y[1].x, y[1].y);
            mma(c[0], {a[q + 2], b[q + 2], a[q + 3], b[q + 3]}, y[0].z, y[0].w);
            mma(c[1], {a[q + 2], b[q + 2], a[q + 3], b[q + 3]}, y[1].z, y[1].w);
          };
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint8_t* from = x_slice + (8 * k + i) * place + 128 * n;
            uint4 high[2], low[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              high[j] = *reinterpret_cast<const uint4*>(from + 128 * j);
              low[j] = *reinterpret_cast<const uint4*>(from + x_plane + 128 * j);
            }
            multiply(h0, h1, 4 * i, low);
            if constexpr (!W::is_lossless) multiply(low0, low1, 4 * i, high);
            multiply(h0, h1, 4 * i, high);
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            sum[n + j][0] = fmaf(c[j][0], power0, sum[n + j][0]);
            sum[n + j][1] = fmaf(c[j][1], power0, sum[n + j][1]);
            sum[n + j][2] = fmaf(c[j][2], power1, sum[n + j][2]);
            sum[n + j][3] = fmaf(c[j][3], power1, sum[n + j][3]);
          }
        }
      }
    }
  }

  // The 8 lanes of a column of sums write 32 bytes side by side.
  const int row = first + g;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int s = 8 * n + 2 * t + j;
      if (s >= count) continue;
      float* out = args.out + (size_t)its_slot[s] * args.n_out + row;
      const float v = sum[n][j] * its_scale[s], w = sum[n][2 + j] * its_scale[s];
      // A router may depend on it: expf, not the approximation of `silu`.
      if (row <= last) out[0] = args.up ? __fdividef(v, 1.0f + expf(-v)) * w : v;
      if (!args.up && row + 8 <= last) out[8] = w;
    }
  }
}

}  // namespace reflex

#define REFLEX_GROUPED(NAME, FORMAT)                                       \
  extern "C" __global__ void __launch_bounds__(reflex::grouped_threads, 1) \
      NAME(const __grid_constant__ reflex::GroupedArgs args) {             \
    reflex::grouped<reflex::FORMAT>(args);                                 \
  }
