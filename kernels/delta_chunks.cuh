// The gated delta rule (delta.cuh) of a text, CHUNK tokens a step, on tensor cores. With the tokens of a chunk counted from
// 0, S the state before them, d_i the decays, b_i = sigmoid(beta), c_i = d_0 .. d_i and P_ij = d_(j+1) .. d_i for j <= i,
//     X = V - diag(c) K S
//     U = T X,  T = (1 + L)^-1 diag(b),  L_ij = b_i P_ij k_i k_j for j < i
//     out = scale (diag(c) Q S + A U),  A_ij = P_ij q_i k_j for j <= i
//     S = c_last S + sum over j of k_j (P_last,j U_j)^T
// T and A need no state: delta_prepare has them for all chunks at once, delta_chunks goes from chunk to chunk. Decays are
// products, never divided by. Tokens beyond the last have k = q = v = b = 0 and d = 1.
//
// A factor of a product is two halves, high + low, which is 22 bits; of the four products that of the low ones is left out.
// Keys and queries are at most 1 long, and so no number of K, Q, T and A exceeds 1. K, Q and A are multiplied by UNIT, a
// column (and slice of rows) of S and X by a power of two of its own, and so is a row of T, lest gates near 0 cost bits; the
// columns of A and P_last undo the latter. All else is float32, S too: what tensor cores add to it is summed apart.
#pragma once

#include "delta.cuh"
#include "mma.cuh"

using reflex::load_matrices, reflex::load_matrices_transposed, reflex::mma, reflex::pack_halves;

constexpr int CHUNK = 16, SLICES = 4;
constexpr float UNIT = 256.0f;

struct ChunkKeys {  // of a chunk and a key head: high and low halves of keys, then of queries
    half planes[4][CHUNK][LARGEST_HEAD];
};

struct ChunkGates {  // of a chunk and a value head
    int4 solve[2][WARP], mix[2][WARP];  // T and A, rows 0-7 and 8-15, as operands b: two pairs of high halves, two of low
    float left[CHUNK], behind[CHUNK];   // c_i; P_last,i for U as it comes from `solve`, below 2 when divided by `most`
    float most, unused[3];
};

// What delta_prepare leaves: keys of all chunks, then gates of all chunks.
struct Prepared {
    ChunkKeys *keys;
    ChunkGates *gates;
    int from;  // the key head of this value head
    bool is_first;  // of the value heads that have it

    __device__ __forceinline__ Prepared(const Delta &a, int head) {
        int per_key = a.n_head_v / a.n_head_k;
        from = a.tiled ? head % a.n_head_k : head / per_key;
        is_first = a.tiled ? head < a.n_head_k : head % per_key == 0;
        ChunkKeys *all = (ChunkKeys *)a.chunks;
        keys = all + from;
        gates = (ChunkGates *)(all + (a.s.n_tokens + CHUNK - 1) / CHUNK * (int64_t)a.n_head_k) + head;
    }
};

// A pair of numbers as high and low halves.
__device__ __forceinline__ void split(float x, float y, unsigned &high, unsigned &low) {
    high = pack_halves(x, y);
    float2 rounded = __half22float2(*(const half2 *)&high);
    low = pack_halves(x - rounded.x, y - rounded.y);
}

struct Operand {  // a, in halves
    unsigned high[4], low[4];

    // From two 16 x 8 tiles of numbers, each row multiplied on the way by what `up` has for rows below 8 and others.
    __device__ __forceinline__ void set(const float (&left)[4], const float (&right)[4],
                                        const float (&up)[2] = {1.0f, 1.0f}) {
        split(left[0] * up[0], left[1] * up[0], high[0], low[0]);
        split(left[2] * up[1], left[3] * up[1], high[1], low[1]);
        split(right[0] * up[0], right[1] * up[0], high[2], low[2]);
        split(right[2] * up[1], right[3] * up[1], high[3], low[3]);
    }
};

// c += a b; the small products first.
__device__ __forceinline__ void multiply_add(float (&c)[4], const Operand &a, unsigned high0, unsigned high1, unsigned low0,
                                             unsigned low1) {
    mma(c, a.low, high0, high1);
    mma(c, a.high, low0, low1);
    mma(c, a.high, high0, high1);
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const Operand &a, int4 b) {
    multiply_add(c, a, (unsigned)b.x, (unsigned)b.y, (unsigned)b.z, (unsigned)b.w);
}

// Powers of two for the rows of tiles: `up` makes the largest number of a row 2^4 to 2^5, `down` undoes that and UNIT.
template <int TILES>
__device__ __forceinline__ void scales(const float (&tiles)[TILES][4], float (&up)[2], float (&down)[2]) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < TILES; i++) most = fmaxf(most, fmaxf(fabsf(tiles[i][2 * row]), fabsf(tiles[i][2 * row + 1])));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        int e = min(max(exponent_of(most), -100), 100) - 4;
        up[row] = power_of_two(-e);
        down[row] = power_of_two(e) / UNIT;
    }
}

constexpr int PADDED = LARGEST_HEAD + 8;  // so that the rows of a matrix lie in different banks

// Grid (chunks, n_head_v), 4 warps.
__device__ __forceinline__ void delta_prepare_chunk(const Delta &a) {
    constexpr int PIECES = LARGEST_HEAD / 8, THREADS = 4 * WARP;
    __shared__ int4 memory[4][CHUNK][PADDED / 8];
    __shared__ float products[2][CHUNK][CHUNK + 1];  // k_i k_j, q_i k_j; then L and A
    __shared__ float decays[CHUNK][CHUNK + 1];       // P_ij, and c_i
    __shared__ float solved[CHUNK][CHUNK + 1];
    __shared__ float2 gate[CHUNK], rows[CHUNK];  // of the latter: what a row of T is multiplied by, and what undoes it
    half(*planes)[CHUNK][PADDED] = (half(*)[CHUNK][PADDED])memory;
    int chunk = blockIdx.x, head = blockIdx.y, first = chunk * CHUNK, n = min(CHUNK, a.s.n_tokens - first);
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, row = lane / 4, pair = lane % 4 * 2;
    Prepared to(a, head);
    let_successor_start();
    wait_for_predecessor();
    for (int i = thread; i < 2 * CHUNK * PIECES; i += THREADS) {
        int which = i / (CHUNK * PIECES), token = i / PIECES % CHUNK, at = i % PIECES * 8;
        const float *x = (which ? a.q : a.k) + (first + token) * (int64_t)a.key_stride + to.from * a.d_k + at;
        float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float4 one = token < n && at < a.d_k ? *(const float4 *)x : zero;
        float4 two = token < n && at + 4 < a.d_k ? *(const float4 *)(x + 4) : zero;
        unsigned high[4], low[4];
        split(one.x * UNIT, one.y * UNIT, high[0], low[0]);
        split(one.z * UNIT, one.w * UNIT, high[1], low[1]);
        split(two.x * UNIT, two.y * UNIT, high[2], low[2]);
        split(two.z * UNIT, two.w * UNIT, high[3], low[3]);
        int4 highs = make_int4(high[0], high[1], high[2], high[3]), lows = make_int4(low[0], low[1], low[2], low[3]);
        memory[2 * which][token][at / 8] = highs;
        memory[2 * which + 1][token][at / 8] = lows;
        if (!to.is_first) continue;
        ChunkKeys &keys = to.keys[chunk * (int64_t)a.n_head_k];
        *(int4 *)&keys.planes[2 * which][token][at] = highs;
        *(int4 *)&keys.planes[2 * which + 1][token][at] = lows;
    }
    if (thread < CHUNK) {
        int64_t at = (first + thread) * (int64_t)a.n_head_v + head;
        gate[thread] = thread < n ? gates(a.alpha[at], a.beta[at], a.dt[head], a.decay[head]) : make_float2(1.0f, 0.0f);
    }
    __syncthreads();

    {
        int which = warp / 2, tile = warp % 2;
        float acc[2][4] = {};
#pragma unroll
        for (int u = 0; u < LARGEST_HEAD / 16; u++) {
            Operand x;
            unsigned y[4];
            load_matrices(x.high, &planes[2 * which][lane % 16][u * 16 + lane / 16 * 8]);
            load_matrices(x.low, &planes[2 * which + 1][lane % 16][u * 16 + lane / 16 * 8]);
            load_matrices(y, &planes[lane / 16][tile * 8 + lane % 8][u * 16 + lane / 8 % 2 * 8]);
            multiply_add(acc[u % 2], x, y[0], y[1], y[2], y[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            products[which][row + i / 2 * 8][tile * 8 + pair + i % 2] = (acc[0][i] + acc[1][i]) / (UNIT * UNIT);
    }
    if (thread <= CHUNK) {
        float left = thread == CHUNK ? 1.0f : 0.0f;
        for (int i = 0; i < CHUNK; i++) decays[i][thread] = left = i == thread ? 1.0f : left * gate[i].x;
    }
    __syncthreads();
    for (int at = thread; at < CHUNK * CHUNK; at += THREADS) {
        int i = at / CHUNK, j = at % CHUNK;
        products[0][i][j] *= gate[i].y * decays[i][j];
        products[1][i][j] *= decays[i][j];
    }
    __syncthreads();
    if (thread < CHUNK) {  // a column of T, row after row
        float column[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            column[i] = i == thread ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j++) column[i] -= products[0][i][j] * column[j];
            solved[i][thread] = column[i] * gate[thread].y;
        }
    }
    __syncthreads();
    ChunkGates &out = to.gates[chunk * (int64_t)a.n_head_v];
    if (warp == 0) {
        int i = lane % CHUNK;
        float most = 0.0f;
#pragma unroll
        for (int j = 0; j < CHUNK; j++) most = fmaxf(most, fabsf(solved[i][j]));
        int e = max(exponent_of(most), -100) - 4;
        float behind = decays[CHUNK - 1][i] * power_of_two(e);
        int e_most = max(exponent_of(warp_max(behind)), -100);
        if (lane < CHUNK) {
            rows[i] = make_float2(power_of_two(-e), power_of_two(e));
            out.left[i] = decays[i][CHUNK];
            out.behind[i] = behind * power_of_two(-e_most);
        }
        // With what is unused behind it, for it is fetched in 16 bytes.
        if (lane == 0) *(float4 *)&out.most = make_float4(power_of_two(e_most), 0.0f, 0.0f, 0.0f);
    }
    __syncthreads();
    int which = warp / 2, tile = warp % 2;
    const float *x = (which ? products[1] : solved)[tile * 8 + row] + pair;
    float ups[4];
#pragma unroll
    for (int i = 0; i < 4; i++) ups[i] = which ? UNIT * rows[pair + i / 2 * 8 + i % 2].y : rows[tile * 8 + row].x;
    unsigned high[2], low[2];
    split(x[0] * ups[0], x[1] * ups[1], high[0], low[0]);
    split(x[8] * ups[2], x[9] * ups[3], high[1], low[1]);
    (which ? out.mix : out.solve)[tile][lane] = make_int4(high[0], high[1], low[0], low[1]);
}

constexpr int COLUMNS = 32;  // of the state a block has

struct ChunkFetch {  // a chunk in shared memory
    half planes[4][CHUNK][PADDED];
    ChunkGates gates;
    float values[CHUNK][COLUMNS + 4];
};

// Fetches chunk after chunk; a thread the same pieces of 16 bytes of each.
struct ChunkFetcher {
    static constexpr int THREADS = COLUMNS / 16 * SLICES * WARP, KEYS = sizeof(ChunkKeys) / 16 / THREADS;
    static constexpr int GATES = sizeof(ChunkGates) / 16, KEY_PIECES = LARGEST_HEAD / 8, VALUE_PIECES = COLUMNS / 4;
    const float *keys, *gates, *values;
    int64_t key_step, gate_step, value_step;
    int row, at, left;  // of values; the tokens from this thread's row on, or less than 1 where it has none to fetch

    __device__ __forceinline__ ChunkFetcher(const Delta &a, const Prepared &from, int head) {
        int thread = threadIdx.x, piece = thread + CHUNK * VALUE_PIECES - THREADS;  // values are fetched by the last threads
        row = piece / VALUE_PIECES, at = piece % VALUE_PIECES * 4;
        int column = blockIdx.y * COLUMNS + at;
        keys = (const float *)from.keys + thread * 4, gates = (const float *)from.gates + thread * 4;
        values = a.v + row * (int64_t)a.value_stride + head * a.d_v + column;
        key_step = a.n_head_k * (int64_t)(sizeof(ChunkKeys) / 4), gate_step = a.n_head_v * (int64_t)(sizeof(ChunkGates) / 4);
        value_step = CHUNK * (int64_t)a.value_stride;
        if (piece < 0) row = -1;
        left = column < a.d_v ? a.s.n_tokens - row : 0;
    }

    __device__ __forceinline__ void next(ChunkFetch &to) {
        int thread = threadIdx.x;
#pragma unroll
        for (int i = 0; i < KEYS; i++)
            fetch((float *)&to.planes[0][thread / KEY_PIECES + i * (THREADS / KEY_PIECES)][thread % KEY_PIECES * 8],
                  keys + i * THREADS * 4);
#pragma unroll
        for (int i = 0; i < GATES; i += THREADS)
            if (thread + i < GATES) fetch((float *)&to.gates + (thread + i) * 4, gates + i * 4);
        if (row >= 0) {
            if (left > 0)
                fetch(to.values[row] + at, values);
            else
                *(float4 *)(to.values[row] + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        keys += key_step, gates += gate_step, values += value_step, left -= CHUNK;
    }
};

struct ChunkMemory {
    ChunkFetch fetches[2];
    float4 parts[COLUMNS / 16][SLICES][4][WARP];  // of K S and of Q S, tokens 0-7 and 8-15, what a slice of rows is in them
};

// As reflex_ipc/cuda/delta.py has them.
static_assert(sizeof(ChunkKeys) == 16384 && sizeof(ChunkGates) == 2192);
static_assert(sizeof(ChunkMemory) == 60192);

// Grid (n_head_v, d_v / COLUMNS), COLUMNS / 4 warps. S lies transposed in the registers, as sums of tensor cores: a warp has
// 16 columns, as rows of a tile, and a slice of 32 rows, as columns of four tiles, which makes it operand a of the next
// product as it is. U is computed in every slice. What comes out of a chunk waits for the next one: nothing waits for Q S.
__device__ __forceinline__ void multiply_chunks(const Delta &a, ChunkMemory &memory) {
    constexpr int ROWS = LARGEST_HEAD / SLICES, TILES = ROWS / 8, STEPS = ROWS / 16;
    int head = blockIdx.x, lane = threadIdx.x % WARP, slice = threadIdx.x / WARP % SLICES;
    int group = threadIdx.x / (WARP * SLICES), pair = lane % 4 * 2, here = group * 16 + lane / 4;
    int column = blockIdx.y * COLUMNS + here;
    Prepared from(a, head);
    ChunkFetcher fetcher(a, from, head);
    let_successor_start();
    wait_for_predecessor();
    fetcher.next(memory.fetches[0]);

    // Numbers 2 r and 2 r + 1 of tile i: column + 8 r, rows slice ROWS + 8 i + pair and the next.
    float state[TILES][4];
    auto each = [&](auto what) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int row = slice * ROWS + 8 * i + pair + j % 2, at = column + j / 2 * 8;
                what(state[i][j], (head * (int64_t)a.d_k + row) * a.d_v + at, row < a.d_k && at < a.d_v);
            }
    };
    const float *before = a.s.before();
    each([&](float &x, int64_t at, bool there) { x = there ? before[at] : 0.0f; });

    // A slice's part in K S or Q S, tokens 0-7 and 8-15.
    auto give = [&](const ChunkFetch &f, int which, const Operand (&x)[STEPS], const float (&down)[2]) {
        float sums[STEPS][2][4] = {};
#pragma unroll
        for (int u = 0; u < STEPS; u++) {
            unsigned high[4], low[4];
            int token = lane / 16 * 8 + lane % 8, at = slice * ROWS + u * 16 + lane / 8 % 2 * 8;
            load_matrices(high, &f.planes[2 * which][token][at]);
            load_matrices(low, &f.planes[2 * which + 1][token][at]);
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
                multiply_add(sums[u][tile], x[u], high[2 * tile], high[2 * tile + 1], low[2 * tile], low[2 * tile + 1]);
        }
        static_assert(STEPS == 2);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            float(&one)[4] = sums[0][tile], (&two)[4] = sums[1][tile];
            memory.parts[group][slice][2 * which + tile][lane] =
                make_float4((one[0] + two[0]) * down[0], (one[1] + two[1]) * down[0], (one[2] + two[2]) * down[1],
                            (one[3] + two[3]) * down[1]);
        }
    };
    auto take = [&](int which, int tile) {
        float4 sum = memory.parts[group][0][2 * which + tile][lane];
#pragma unroll
        for (int s = 1; s < SLICES; s++) {
            float4 part = memory.parts[group][s][2 * which + tile][lane];
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        return sum;
    };

    // Two slices of a group write what comes out, tokens 0-7 and 8-15; in each group others, for the sake of the schedulers.
    int half_here = slice ^ 2 * group, token = 8 * half_here + pair;
    bool writes = half_here < 2;
    int64_t stride = a.n_head_v * (int64_t)a.d_v;
    float *out = a.out + token * stride + head * a.d_v + column;
    float4 mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // A U of tokens `token` and the next
    float2 lefts = make_float2(0.0f, 0.0f);
    auto put = [&] {
        if (!writes) return;
        float4 seen = take(1, half_here);
        bool one = column < a.d_v, two = column + 8 < a.d_v;
        if (token < a.s.n_tokens) {
            if (one) out[0] = a.scale * (lefts.x * seen.x + mixed.x);
            if (two) out[8] = a.scale * (lefts.x * seen.z + mixed.z);
        }
        if (token + 1 < a.s.n_tokens) {
            if (one) out[stride] = a.scale * (lefts.y * seen.y + mixed.y);
            if (two) out[stride + 8] = a.scale * (lefts.y * seen.w + mixed.w);
        }
        token += CHUNK, out += CHUNK * stride;
    };

    for (int first = 0; first < a.s.n_tokens; first += CHUNK) {
        ChunkFetch &f = memory.fetches[first / CHUNK % 2];
        float up[2], down[2], more_up[2], more_down[2];
        Operand x[STEPS], y;
        scales(state, up, down);
#pragma unroll
        for (int u = 0; u < STEPS; u++) x[u].set(state[2 * u], state[2 * u + 1], up);
        wait_for_fetched();
        __syncthreads();
        give(f, 0, x, down);
        if (first + CHUNK < a.s.n_tokens) fetcher.next(memory.fetches[1 - first / CHUNK % 2]);
        if (first) put();
        __syncthreads();

        float change[2][4], written[2][4] = {}, kept[2][4];  // X, U, U as far as the chunk's last token has it
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            int at = 8 * tile + pair;
            float4 remembered = take(0, tile);
            float2 left = *(const float2 *)(f.gates.left + at);
            change[tile][0] = f.values[at][here] - left.x * remembered.x;
            change[tile][1] = f.values[at + 1][here] - left.y * remembered.y;
            change[tile][2] = f.values[at][here + 8] - left.x * remembered.z;
            change[tile][3] = f.values[at + 1][here + 8] - left.y * remembered.w;
        }
        give(f, 1, x, down);
        scales(change, more_up, more_down);
        y.set(change[0], change[1], more_up);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            multiply_add(written[tile], y, f.gates.solve[tile][lane]);
            float2 behind = *(const float2 *)(f.gates.behind + 8 * tile + pair);
#pragma unroll
            for (int j = 0; j < 4; j++) kept[tile][j] = written[tile][j] * (j % 2 ? behind.y : behind.x);
        }
        // U, still multiplied by `more_up`, is the sum of 16 products of numbers below 2^5 each, `kept` at most twice that.
        y.set(kept[0], kept[1]);
        float left = f.gates.left[CHUNK - 1], most = f.gates.most, back[2] = {most * more_down[0], most * more_down[1]};
#pragma unroll
        for (int i = 0; i < TILES; i += 2) {
            unsigned high[4], low[4];
            const half *row = &f.planes[0][lane % 16][slice * ROWS + i * 8 + lane / 16 * 8];
            load_matrices_transposed(high, row);
            load_matrices_transposed(low, row + CHUNK * PADDED);
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                float more[4] = {};
                multiply_add(more, y, high[2 * tile], high[2 * tile + 1], low[2 * tile], low[2 * tile + 1]);
#pragma unroll
                for (int j = 0; j < 4; j++) state[i + tile][j] = left * state[i + tile][j] + back[j / 2] * more[j];
            }
        }
        if (!writes) continue;
        y.set(written[0], written[1]);
        float sums[4] = {};
        multiply_add(sums, y, f.gates.mix[half_here][lane]);
        mixed = make_float4(more_down[0] * sums[0], more_down[0] * sums[1], more_down[1] * sums[2], more_down[1] * sums[3]);
        lefts = *(const float2 *)(f.gates.left + 8 * half_here + pair);
    }
    __syncthreads();
    put();
    if (!a.s.kept()) return;
    float *after = a.s.after();
    each([&](float &x, int64_t at, bool there) {
        if (there) after[at] = x;
    });
}
