// Attention of the T tokens of a step over the cache, in which the step's own keys and values are already, on tensor
// cores.
//
// Token t of the step, at cache position past + t, sees the positions before `past` and its ancestors in the step: where
// `mask` is null, all tokens of the step up to itself. Otherwise mask (T, 1 + ceil(T/32)) words: the first is 0 for a
// token that doesn't see the cache before the step, bit s of the others says whether t sees token s, which is t or before
// it. Tiles of a tree that no row sees are not read: of a large one that is most of them.
//
// The rows of a tile are (token, head) pairs of one key head's group, so that short steps fill tiles and keys are read
// once a group. Grid (ceil(T * group / ROWS), n_head_kv), ROWS / 16 warps. KEYS and VALUES are d and d_v rounded up to
// what is compiled; what lies beyond is zero. Scores are half x half products in float32; q goes in as two halves, high
// and low, of a row scaled by a power of two, so only the cache's own rounding is lost. Softmax in float32, online.
//
// EXACT: keys and values are two halves as well, what fits one and the rest of it, `rest` halves on, and so are weights.
// Keys and values were computed for this step (expand.cu), and what halves lose would tip routers as in any other product
// before them.
#include <math_constants.h>

#include "cache.cuh"
#include "mma.cuh"

using reflex::load_matrices, reflex::load_matrices_transposed, reflex::mma, reflex::pack_halves;

constexpr float LOG2_E = 1.4426950408889634f;

struct Prefill {
    const float *q;  // (T, stride * d), finished: n_head of a token's heads, `stride` in all
    float *out;      // (T, stride * d_v)
    const uint32_t *mask;
    const int *past;
    Cache cache;
    int n_tokens, n_head;
    float scale;
    int stride;
    int rest, rest_d;  // EXACT alone: halves from a key or value to its rest, numbers of a key that have one
};

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The first n bits.
__device__ __forceinline__ uint64_t ones(int n) { return n >= 64 ? ~0ull : n > 0 ? (1ull << n) - 1 : 0; }

// Which of the 64 positions from `start` on a token sees, by its row of the mask: `past` of them are before the step.
__device__ __forceinline__ uint64_t seen_of(const uint32_t *mask, int words, int past, int start) {
    int first = max(start - past, 0), before = past - start;
    uint32_t word[3];
#pragma unroll
    for (int i = 0; i < 3; i++) word[i] = 1 + first / 32 + i < words ? mask[1 + first / 32 + i] : 0;
    uint64_t bits = (word[0] | (uint64_t)word[1] << 32) >> first % 32;
    if (first % 32) bits |= (uint64_t)word[2] << (64 - first % 32);
    if (before <= 0) return bits;
    return (before < 64 ? bits << before : 0) | (mask[0] ? ones(before) : 0);
}

template <int KEYS, int VALUES, int ROWS, int COLUMNS>
struct Tiles {  // what a block shares; the keys of a tile make room for its values
    static_assert(VALUES <= KEYS);
    half high[ROWS][KEYS + 8], low[ROWS][KEYS + 8];
    half tile[COLUMNS][KEYS + 8];
    float key_scales[COLUMNS], value_scales[COLUMNS];
    float row_scales[ROWS];
};

// COLUMNS rows of `width` numbers, of which n are there; the others are zero. Asked for first, put where they are shared
// later. A tile's rows are of one page of the cache, `stride` apart.
template <int WIDTH, int COLUMNS, int THREADS>
struct Share {
    static constexpr int LANES = WIDTH % 64 ? 4 : 8, PARTS = WIDTH / 8 / LANES;  // threads of a row, eights of a thread
    static constexpr int N = COLUMNS * PARTS * LANES / THREADS;
    static_assert(COLUMNS * LANES % THREADS == 0 && WIDTH == 8 * LANES * PARTS && PAGE % COLUMNS == 0);
    int4 eights[N];

    static __device__ __forceinline__ int row(int i) { return threadIdx.x / LANES + i / PARTS * (THREADS / LANES); }
    static __device__ __forceinline__ int column(int i) { return (threadIdx.x % LANES + i % PARTS * LANES) * 8; }

    __device__ __forceinline__ void load(const half *rows, int stride, int width, int n) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            eights[i] = make_int4(0, 0, 0, 0);
            if (row(i) < n && column(i) < width) eights[i] = *(const int4 *)(rows + row(i) * stride + column(i));
        }
    }
    template <int STRIDE>
    __device__ __forceinline__ void store(half (&tile)[COLUMNS][STRIDE]) const {
#pragma unroll
        for (int i = 0; i < N; i++) *(int4 *)&tile[row(i)][column(i)] = eights[i];
    }
};

template <int KEYS, int VALUES, int ROWS, int COLUMNS, bool EXACT>
__device__ __forceinline__ void attend(const Prefill &a) {
    constexpr int WARPS = ROWS / 16, THREADS = WARPS * WARP;
    extern __shared__ int4 memory[];
    auto &s = *(Tiles<KEYS, VALUES, ROWS, COLUMNS> *)memory;
    wait_for_predecessor();  // its successor starts when it ends: docs/decisions.md
    const Cache &c = a.cache;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, kv = blockIdx.y, group = a.n_head / c.n_head_kv;
    int row0 = blockIdx.x * ROWS, n_rows = a.n_tokens * group, past = *a.past;
    int last_token = min(row0 + ROWS, n_rows) - 1;
    last_token /= group;
    int end = past + last_token + 1;  // positions that some row of the tile may see

    // q, scaled to below 2^14. A short step waits for memory here and little else: several rows are asked for at once.
    constexpr int QUADS = (KEYS + 4 * WARP - 1) / (4 * WARP), AT_ONCE = 8 / QUADS;
    for (int first = warp; first < ROWS; first += WARPS * AT_ONCE) {
        float4 x[AT_ONCE][QUADS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int row = row0 + first + i * WARPS;
            const float *q = a.q + (row / group * (int64_t)a.stride + kv * group + row % group) * c.d;
#pragma unroll
            for (int k = 0; k < QUADS; k++) {
                int column = 4 * (lane + k * WARP);
                x[i][k] = row < n_rows && column < c.d ? *(const float4 *)(q + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int r = first + i * WARPS;
            float largest = 0.0f;
#pragma unroll
            for (int k = 0; k < QUADS; k++)
                largest = fmaxf(fmaxf(fmaxf(largest, fabsf(x[i][k].x)), fmaxf(fabsf(x[i][k].y), fabsf(x[i][k].z))),
                                fabsf(x[i][k].w));
            int e = min(max(exponent_of(warp_max(largest)) - 13, -100), 115);
            float shrink = power_of_two(-e);
#pragma unroll
            for (int k = 0; k < QUADS; k++) {
                int column = 4 * (lane + k * WARP);
                float y[4] = {x[i][k].x * shrink, x[i][k].y * shrink, x[i][k].z * shrink, x[i][k].w * shrink};
                uint2 high = make_uint2(pack_halves(y[0], y[1]), pack_halves(y[2], y[3]));
                const half *h = (const half *)&high;
#pragma unroll
                for (int j = 0; j < 4; j++) y[j] -= __half2float(h[j]);
                if (column < KEYS) {
                    *(uint2 *)&s.high[r][column] = high;
                    *(uint2 *)&s.low[r][column] = make_uint2(pack_halves(y[0], y[1]), pack_halves(y[2], y[3]));
                }
            }
            if (lane == 0) s.row_scales[r] = power_of_two(e) * a.scale * LOG2_E;
        }
    }
    __syncthreads();
    int r = warp * 16 + lane / 4;  // this lane has rows r and r + 8 of the tile
    int tokens[2] = {(row0 + r) / group, (row0 + r + 8) / group};
    bool rows_there[2] = {row0 + r < n_rows, row0 + r + 8 < n_rows};
    float row_scales[2] = {s.row_scales[r], s.row_scales[r + 8]};
    int words = 1 + (a.n_tokens + 31) / 32;
    const uint32_t *masks[2];
    for (int i = 0; i < 2; i++) masks[i] = a.mask + (rows_there[i] ? tokens[i] * (int64_t)words : 0);
    float maxima[2] = {-CUDART_INF_F, -CUDART_INF_F}, sums[2] = {0.0f, 0.0f};
    float out[VALUES / 8][4];
#pragma unroll
    for (int j = 0; j < VALUES / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[j][i] = 0.0f;

    float scores[COLUMNS / 8][4];
    auto multiply = [&](bool are_rests) {  // queries with the tile; rests with their high halves alone
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            if (EXACT && k >= (are_rests ? a.rest_d : c.d)) break;
            unsigned high[4], low[4];
            load_matrices(high, &s.high[warp * 16 + lane % 16][k + lane / 16 * 8]);
            if (!are_rests) load_matrices(low, &s.low[warp * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j += 2) {
                unsigned pair[4];
                load_matrices(pair, &s.tile[j * 8 + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (!are_rests) mma(scores[j + i], low, pair[2 * i], pair[2 * i + 1]);
                    mma(scores[j + i], high, pair[2 * i], pair[2 * i + 1]);
                }
            }
        }
    };
    auto mix = [&](bool are_rests) {  // out += weights, which the scores have become, times the tile; rests as above
#pragma unroll
        for (int k = 0; k < COLUMNS; k += 16) {
            unsigned weights[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *x = &scores[k / 8 + i / 2][i % 2 * 2];
                weights[i] = pack_halves(x[0], x[1]);
                const half *h = (const half *)&weights[i];
                if (EXACT && !are_rests) low[i] = pack_halves(x[0] - __half2float(h[0]), x[1] - __half2float(h[1]));
            }
#pragma unroll
            for (int j = 0; j < VALUES / 8; j += 2) {
                unsigned pair[4];
                load_matrices_transposed(pair, &s.tile[k + lane % 16][j * 8 + lane / 16 * 8]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (EXACT && !are_rests) mma(out[j + i], low, pair[2 * i], pair[2 * i + 1]);
                    mma(out[j + i], weights, pair[2 * i], pair[2 * i + 1]);
                }
            }
        }
    };

    for (int start = 0; start < end; start += COLUMNS) {
        if (a.mask) {  // the four lanes of a row look at a word each of the three that a tile may touch
            int word = max(start - past, 0) / 32 + lane % 4;
            bool sees = false;
            // Rows that are not there have the mask of the step's first token: at worst a tile is read for nothing.
            if (start < past) sees = masks[0][0] | masks[1][0];
            if (32 * word < min(start + COLUMNS, end) - past) sees |= (masks[0][1 + word] | masks[1][1 + word]) != 0;
            if (!__syncthreads_or(sees)) continue;
        }
        Share<KEYS, COLUMNS, THREADS> keys;
        Share<VALUES, COLUMNS, THREADS> values;
        auto load_keys = [&](int rest, int width) {
            keys.load(c.key(start, kv) + rest, c.n_head_kv * c.d, width, end - start);
        };
        auto load_values = [&](int rest) {
            values.load(c.value(start, kv) + rest, c.n_head_kv * c.d_v, c.d_v, end - start);
        };
        load_keys(0, c.d);
        constexpr bool EARLY = VALUES <= 128;  // as far as registers suffice
        static_assert(EARLY || !EXACT);
        if (EARLY && !EXACT) load_values(0);
        keys.store(s.tile);
        for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
            bool there = start + i < end;
            s.key_scales[i] = there ? *c.key_scale(start + i, kv) : 0.0f;
            s.value_scales[i] = there ? *c.value_scale(start + i, kv) : 0.0f;
        }
        __syncthreads();
        if (EXACT) load_keys(a.rest, a.rest_d);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[j][i] = 0.0f;
        multiply(false);
        __syncthreads();  // the keys are read: room for what is next
        if (EXACT) {
            keys.store(s.tile);
            load_values(0);
            __syncthreads();
            multiply(true);
            __syncthreads();
        }
        if (!EARLY) load_values(0);
        values.store(s.tile);
        float largest[2] = {maxima[0], maxima[1]};
        static_assert(COLUMNS <= 64);
        uint64_t seen[2];  // bit i: the position of this lane's column i
#pragma unroll
        for (int i = 0; i < 2; i++) {
            seen[i] = ones(a.mask ? end - start : min(end, past + tokens[i] + 1) - start);
            if (a.mask) seen[i] &= seen_of(masks[i], words, past, start);
            seen[i] = rows_there[i] ? seen[i] >> lane % 4 * 2 : 0;
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int half_row = i / 2, column = j * 8 + lane % 4 * 2 + i % 2;
                bool sees = seen[half_row] >> (j * 8 + i % 2) & 1;
                float score = sees ? scores[j][i] * row_scales[half_row] * s.key_scales[column] : -CUDART_INF_F;
                scores[j][i] = score;
                largest[half_row] = fmaxf(largest[half_row], score);
            }
        float shrinks[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[i] = quad_max(largest[i]);
            float reference = largest[i] == -CUDART_INF_F ? 0.0f : largest[i];
            shrinks[i] = exp2f(maxima[i] - reference);
            sums[i] *= shrinks[i];
            maxima[i] = largest[i];
            largest[i] = reference;
        }
        // Values that were stored with a scale: the weights carry it, within half precision by the tile's largest.
        float tile_scale = 0.0f;
        for (int i = 0; i < COLUMNS; i++) tile_scale = fmaxf(tile_scale, s.value_scales[i]);
        float inverse = 1.0f / tile_scale;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float weight = exp2f(scores[j][i] - largest[i / 2]);
                sums[i / 2] += weight;
                scores[j][i] = weight * (s.value_scales[j * 8 + lane % 4 * 2 + i % 2] * inverse);
            }
#pragma unroll
        for (int j = 0; j < VALUES / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) out[j][i] *= shrinks[i / 2] * inverse;
        __syncthreads();
        if (EXACT) load_values(a.rest);
        mix(false);
        if (EXACT) {
            __syncthreads();
            values.store(s.tile);
            __syncthreads();
            mix(true);
        }
        if (tile_scale != 1.0f)
#pragma unroll
            for (int j = 0; j < VALUES / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[j][i] *= tile_scale;
        __syncthreads();  // the tile is read: room for the next
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float divisor = 1.0f / quad_sum(sums[i]);
        if (!rows_there[i]) continue;
        int head = kv * group + (row0 + r + 8 * i) % group;
        float *to = a.out + (tokens[i] * (int64_t)a.stride + head) * c.d_v;
#pragma unroll
        for (int j = 0; j < VALUES / 8; j++) {
            int column = j * 8 + lane % 4 * 2;
            if (column < c.d_v) *(float2 *)(to + column) = make_float2(out[j][2 * i] * divisor, out[j][2 * i + 1] * divisor);
        }
    }
}

#define ATTENTION(NAME, KEYS, VALUES, ROWS, COLUMNS, EXACT)                                                              \
    extern "C" __global__ void __launch_bounds__(ROWS * 2, 1)                                                            \
        attention_prefill_##NAME(const __grid_constant__ Prefill a) {                                                    \
        attend<KEYS, VALUES, ROWS, COLUMNS, EXACT>(a);                                                                   \
    }

ATTENTION(64, 64, 64, 64, 64, false)
ATTENTION(96, 96, 96, 64, 64, false)
ATTENTION(128, 128, 128, 64, 64, false)
ATTENTION(192, 192, 192, 32, 32, false)
ATTENTION(256, 256, 256, 32, 32, false)
ATTENTION(exact, 192, 128, 64, 32, true)  // what shared memory of 64 KB holds
