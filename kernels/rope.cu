// Rotary positions, and everything else that q, k and v go through before attention (heads.cuh). Their successors start when
// they end: docs/decisions.md.
#include "heads.cuh"

constexpr int HEADS_A_BLOCK = 4;
constexpr int LARGEST_HEAD = 256;

// table (T, n_pairs): (cos, sin) of position * frequency / factor, times magnitude. The angle is float64: it grows with
// the position, and float32 would lose its fraction in long contexts. One block a token.
extern "C" __global__ void rope_table(float2 *table, const int *positions, const double *frequencies, const float *factors,
                                      double magnitude, int n_pairs) {
    wait_for_predecessor();
    double position = positions[blockIdx.x];
    for (int i = threadIdx.x; i < n_pairs; i += blockDim.x) {
        double frequency = frequencies[i], sine, cosine;
        if (factors) frequency /= factors[i];
        sincos(position * frequency, &sine, &cosine);
        table[blockIdx.x * n_pairs + i] = make_float2(float(cosine * magnitude), float(sine * magnitude));
    }
}

// out = x with dims [offset, offset + n_rot) of each head rotated. x, out (T, n_head * d), never the same. One block a
// row.
extern "C" __global__ void rotate(float *out, const float *x, const float2 *table, int n_head, int d, int offset, int n_rot,
                                  int neox) {
    wait_for_predecessor();
    int pairs = n_rot / 2;
    x += blockIdx.x * (int64_t)(n_head * d);
    out += blockIdx.x * (int64_t)(n_head * d);
    table += blockIdx.x * pairs;
    for (int i = threadIdx.x; i < n_head * d; i += blockDim.x) {
        int r = i % d - offset;
        if (r < 0 || r >= n_rot) {
            out[i] = x[i];
            continue;
        }
        int pair = neox ? r % pairs : r / 2;
        bool is_second = neox ? r >= pairs : r % 2;
        int distance = neox ? pairs : 1;
        float2 turn = table[pair];
        out[i] = is_second ? x[i - distance] * turn.y + x[i] * turn.x : x[i] * turn.x - x[i + distance] * turn.y;
    }
}

// Puts the keys and values of a step into the cache, finished; q, where q_out (T, n_head * d) is given, is finished into
// it. One warp a head of a token; HEADS_A_BLOCK warps a block; grid (heads of q_out, k and v, rounded up to blocks; T).
extern "C" __global__ void finish_heads(const __grid_constant__ Heads h, float *q_out) {
    __shared__ float rows[HEADS_A_BLOCK][LARGEST_HEAD];
    wait_for_predecessor();
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, token = blockIdx.y;
    float *row = rows[warp];
    int head = blockIdx.x * HEADS_A_BLOCK + warp, n_q = q_out ? h.n_head : 0;
    if (head < n_q) {
        int d = h.cache.d;
        Head<LARGEST_HEAD / WARP> query;
        query.read_norm(h, h.q_norm);
        query.read(h, h.q + token * (int64_t)h.q_stride + head * d, token);
        query.finish(h, row, h.q_norm);
        float *out = q_out + (token * (int64_t)h.n_head + head) * d;
        for (int i = lane; i < d; i += WARP) out[i] = row[i];
    } else if (head < n_q + h.cache.n_head_kv) {
        Head<LARGEST_HEAD / WARP> key;
        key.read_norm(h, h.k_norm);
        store_key(key, h, row, token, head - n_q);
    } else if (head < n_q + 2 * h.cache.n_head_kv) {
        store_value(h, token, head - n_q - h.cache.n_head_kv);
    }
}
