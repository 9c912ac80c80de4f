// Latent attention of a long step in expanded form: every head's keys and values of all positions, as a cache that
// attention_prefill.cu attends to.
//
//     key[s][h] = k_b[h]^T c_s, then the rotated part that all heads share;  value[s][h] = v_b[h] c_s
//
// Latents are the halves that are cached. Matrices are halves too, each row (a number of a key or value) divided by a
// power of two, with a second plane of what halves lose of it where that is more than nothing. Sums are float32, rows of
// the result halves with a scale as everywhere in a cache, and what they lose is kept behind them, `rest` halves on.
#include "cache.cuh"
#include "mma.cuh"

using reflex::commit_copies, reflex::copy16, reflex::load_matrices, reflex::mma, reflex::pack_halves,
    reflex::shared_address, reflex::wait_copies;

struct Halve {
    half *out;       // (planes, matrices, n_rows, k): row n of matrix m at (m * n_rows + n) k
    float *scale;    // (matrices, n_rows)
    const float *w;  // (matrices, n, k), or, turned, (matrices, k, n)
    int n, k, n_rows, turned;
    int64_t plane;  // halves from the first plane to the second, 0 for none
};

// k a multiple of 8. Grid (ceil(n / 32), matrices), 256 threads.
extern "C" __global__ void __launch_bounds__(256) halve(const __grid_constant__ Halve a) {
    __shared__ float tile[32][33];
    let_successor_start();
    wait_for_predecessor();
    int first = blockIdx.x * 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int r = threadIdx.x / 8, c = threadIdx.x % 8 * 4;  // a thread has four numbers of a row of the tile
    const float *w = a.w + blockIdx.y * (int64_t)a.n * a.k;
    auto load = [&](int k0) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            int n = first + (a.turned ? lane : warp + i), k = k0 + (a.turned ? warp + i : lane);
            float x = n < a.n && k < a.k ? w[a.turned ? k * (int64_t)a.n + n : n * (int64_t)a.k + k] : 0.0f;
            tile[n - first][k - k0] = x;
        }
        __syncthreads();
    };
    float largest = 0.0f;
    for (int k0 = 0; k0 < a.k; k0 += 32) {
        load(k0);
#pragma unroll
        for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(tile[r][c + i]));
    }
#pragma unroll
    for (int lanes = 4; lanes; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    int e = min(max(exponent_of(largest) - 13, -100), 115);
    float shrink = power_of_two(-e);
    int64_t row = blockIdx.y * (int64_t)a.n_rows + first + r;
    bool is_there = first + r < a.n;
    if (is_there && c == 0) a.scale[row] = power_of_two(e);
    for (int k0 = 0; k0 < a.k; k0 += 32) {
        load(k0);
        if (!is_there || k0 + c >= a.k) continue;
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = tile[r][c + i] * shrink;
        uint2 high = make_uint2(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]));
        half *to = a.out + row * a.k + k0 + c;
        *(uint2 *)to = high;
        if (!a.plane) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] -= __half2float(((const half *)&high)[i]);
        *(uint2 *)(to + a.plane) = make_uint2(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]));
    }
}

struct Expand {
    Cache latents;         // n_head_kv = 1, d = rank + d_rope
    Cache expanded;        // of n_head_kv heads: d = d_nope + d_rope, d_v
    const half *w;         // (planes, n_head_kv, d_nope + d_v, rank)
    const float *w_scale;  // (n_head_kv, d_nope + d_v)
    const int *past;
    int n_tokens, rank, planes;
    int rest;  // halves from a key or value to its rest; what is rotated has none
};

constexpr int THREADS = 256;
constexpr int ROWS = 128, COLUMNS = 128;  // of a tile
constexpr int STEP = 32, STAGES = 3;      // columns of latents at a time, times that are on their way
constexpr int ROW_BYTES = 2 * (STEP + 8);  // in shared memory: eight rows of a matrix load meet in no bank
constexpr int STAGE = (ROWS + COLUMNS) * ROW_BYTES;
constexpr int COPIES = (ROWS + COLUMNS) * (STEP / 8) / THREADS;  // of a thread in a step

// Keys (z = 0) or values (z = 1) of one head at ROWS positions, of up to COLUMNS numbers each. Grid (tiles, n_head_kv, 2),
// THREADS threads: a warp has 64 x 32 of the tile. Shared: STAGES stages.
extern "C" __global__ void __launch_bounds__(THREADS, 2) expand(const __grid_constant__ Expand a) {
    extern __shared__ int4 memory[];
    let_successor_start();
    wait_for_predecessor();
    int start = blockIdx.x * ROWS, end = *a.past + a.n_tokens, head = blockIdx.y;
    if (start >= end) return;
    bool are_keys = blockIdx.z == 0;
    int d_nope = a.expanded.d - (a.latents.d - a.rank), n_rows = d_nope + a.expanded.d_v;
    int width = are_keys ? d_nope : a.expanded.d_v, first_row = head * n_rows + (are_keys ? 0 : d_nope);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warp_m = warp % 2 * 64, warp_n = warp / 2 * 32;

    // A tile is of one page of either cache. A thread copies the same 16 bytes of the same rows in every step.
    const half *latents = a.latents.key(start, 0);
    uint32_t base = shared_address(memory);
    int chunk = threadIdx.x % (STEP / 8) * 8, steps = (a.rank + STEP - 1) / STEP, n_steps = steps * a.planes;
    int64_t plane = (int64_t)a.expanded.n_head_kv * n_rows * a.rank;
    const half *from[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        int row = (threadIdx.x + i * THREADS) / (STEP / 8), n = row - ROWS;
        if (n < 0)
            from[i] = start + row < end ? latents + row * a.latents.d + chunk : nullptr;
        else
            from[i] = n < width ? a.w + (first_row + n) * (int64_t)a.rank + chunk : nullptr;
    }
    auto copy = [&](int step) {
        int of_plane = step >= steps, k = (step - of_plane * steps) * STEP;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int row = (threadIdx.x + i * THREADS) / (STEP / 8);
            bool is_there = from[i] && step < n_steps && k + chunk < a.rank;
            const half *at = is_there ? from[i] + k + (row < ROWS ? 0 : of_plane * plane) : a.w;
            copy16(base + step % STAGES * STAGE + row * ROW_BYTES + 2 * chunk, at, is_there);
        }
        commit_copies();
    };
    float sum[4][4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) sum[i][j][c] = 0.0f;
#pragma unroll 1
    for (int step = 1 - STAGES; step < n_steps; step++) {
        if (step >= 0) {
            wait_copies<STAGES - 2>();
            __syncthreads();  // the step's copies are there, and everyone is done with the stage that is filled next
        }
        copy(step + STAGES - 1);
        if (step < 0 || warp_n >= width) continue;
        uint32_t x = base + step % STAGES * STAGE, w = x + ROWS * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t left[4][4], right[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                load_matrices(left[i], x + (warp_m + 16 * i + lane % 16) * ROW_BYTES + 2 * (k + lane / 16 * 8));
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrices(right[j],
                              w + (warp_n + 16 * j + lane / 16 * 8 + lane % 8) * ROW_BYTES + 2 * (k + lane / 8 % 2 * 8));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) mma(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
        }
    }

    // A row's scale is that of its largest number, of all warps that have a part of it, and no less than its latent's,
    // which is that of the rotated part.
    wait_copies<0>();
    __syncthreads();
    float(*largest)[ROWS] = (float(*)[ROWS])memory;  // (COLUMNS / 32, ROWS)
    float *shrinks = largest[COLUMNS / 32];          // of the rotated part
    const float *latent_scales = a.latents.key_scale(start, 0);
    int row0 = warp_m + lane / 4, column0 = warp_n + lane % 4 * 2;  // a lane has rows row0 + 8 i, columns column0 + 8 j
    int there = end - start;
    float w_scales[4][2];
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int column = column0 + 8 * j + c;
            w_scales[j][c] = column < width ? a.w_scale[first_row + column] : 0.0f;
        }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = row0 + 8 * i;
        float latent_scale = row < there ? latent_scales[row] : 1.0f, most = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = sum[i / 2][j][i % 2 * 2 + c];
                x *= latent_scale * w_scales[j][c];
                most = fmaxf(most, fabsf(x));
            }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        if (lane % 4 == 0) largest[warp_n / 32][row] = most;
    }
    __syncthreads();
    half *out = are_keys ? a.expanded.key(start, head) : a.expanded.value(start, head);
    float *scales = are_keys ? a.expanded.key_scale(start, head) : a.expanded.value_scale(start, head);
    int stride = a.expanded.n_head_kv * (are_keys ? a.expanded.d : a.expanded.d_v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = row0 + 8 * i;
        if (row >= there) break;
        float most = 0.0f;
        for (int part = 0; part < COLUMNS / 32; part++) most = fmaxf(most, largest[part][row]);
        int latent_e = exponent_of(latent_scales[row]);
        int e = min(max(exponent_of(most) - CACHE_LARGEST_EXPONENT, latent_e), 126);
        float shrink = power_of_two(-e);
        half *to = out + row * stride + column0, *rest = to + a.rest;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float *x = &sum[i / 2][j][i % 2 * 2];
            uint32_t high = pack_halves(x[0] * shrink, x[1] * shrink);
            const half *h = (const half *)&high;
            uint32_t low = pack_halves(x[0] * shrink - __half2float(h[0]), x[1] * shrink - __half2float(h[1]));
            if (warp_n + 8 * j < width) *(uint32_t *)(to + 8 * j) = high, *(uint32_t *)(rest + 8 * j) = low;
        }
        if (column0 == 0) {
            scales[row * a.expanded.n_head_kv] = power_of_two(e);
            shrinks[row] = power_of_two(latent_e - e);
        }
    }
    if (!are_keys) return;
    __syncthreads();
    int eights = (a.latents.d - a.rank) / 8;
    for (int i = threadIdx.x; i < min(ROWS, there) * eights; i += THREADS) {
        int row = i / eights, column = i % eights * 8;
        uint4 x = *(const uint4 *)(latents + row * a.latents.d + a.rank + column);
        half *numbers = (half *)&x;
        if (shrinks[row] != 1.0f)
            for (int j = 0; j < 8; j++) numbers[j] = __float2half_rn(__half2float(numbers[j]) * shrinks[row]);
        *(uint4 *)(out + row * stride + d_nope + column) = x;
    }
}
