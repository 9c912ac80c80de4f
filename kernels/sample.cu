// From logits to the next token, on the device (docs/sampling.md defines every step).
//
//     sample_peak      many blocks: the largest logit, the lowest id that has it, ln of the sum of exp(logit - peak); where
//                      the answer is greedy it also hands the token on
//     sample_adjust    a copy of the logits with biases and penalties
//     sample_choose    one block: top_k, top_p, min_p, the draw, the likeliest tokens for the report; hands the token on
//
// To hand a token on is to make it the next step's input, to count, and to write the report into the host's mailbox.
//
// What decides a token is made of IEEE-754 additions, multiplications and divisions rounded one by one, and of integers;
// sums of integers have no order. So host and device agree. Logits order by their bits, so mapped that a higher logit is a
// smaller integer, above the id: no two keys are equal. What top_k, top_p and min_p leave is found by radix selection.
#include <math_constants.h>

#include "block.cuh"

constexpr int MOST_TOP = 20;
constexpr int MAILS = 4;
constexpr int BLOCK = 1024;

// What a step reads and leaves, in device memory.
struct Control {
    int past;     // tokens in the cache before the step
    int advance;  // tokens that the step adds to it
    int serial;   // of the next report, from 0 since the executor began
    int parity;   // which of the two recurrent states is the one before the step
    int ticket;   // of sample_peak's blocks
    int best;
    float peak;
    int unused;
    double log_sum;
};

struct Settings {
    double temperature;
    uint64_t top_p;       // in units of 2^-64
    uint64_t min_p;       // least weight, in units of ONE
    uint64_t seed;
    uint64_t draw;        // number of the next token of this answer
    double repeat_penalty, presence_penalty, frequency_penalty;
    int top_k;            // 0: all
    int is_top_p;         // whether top_p is below 1
    int is_greedy;        // the highest adjusted logit, no draw
    int n_top;            // likeliest tokens to report
    int n_changes, unused;
};

// One token whose logit a bias or a penalty changes.
struct Change {
    double bias;
    int token, count;  // how often the answer holds it
    int repeats;       // within reach of the repeat penalty
    int has_bias;
};

struct Mail {
    int token;
    float peak;  // NaN or infinite where the model broke
    double log_sum;
    int best, n_top;
    int top[MOST_TOP];
    float top_logits[MOST_TOP];
    float logit;  // of token, unadjusted
    int serial;   // plus one; written last
};

struct Sample {
    const float *logits, *adjusted;  // (n); the same where nothing is adjusted
    Control *control;
    Settings *settings;
    Mail *mails;
    int *tokens, *positions;  // of the next step: one of each
    float *maxima, *sums;     // (gridDim.x of sample_peak)
    int *ids;
    int n, hand_on;
};

// --- handing on -------------------------------------------------------------------------------------------------------

__device__ void hand_on(const Sample &a, int token, int n_top, const uint64_t *top) {
    Control &c = *a.control;
    Mail &mail = a.mails[c.serial % MAILS];
    mail.token = token;
    mail.peak = c.peak;
    mail.best = c.best;
    mail.log_sum = c.log_sum;
    mail.logit = a.logits[token];
    mail.n_top = n_top;
    for (int i = 0; i < n_top; i++) {
        mail.top[i] = int(top[i] & 0xffffffff);
        mail.top_logits[i] = a.logits[mail.top[i]];
    }
    *a.tokens = token;
    c.past += c.advance;
    c.parity ^= c.advance > 0;
    c.advance = 1;
    *a.positions = c.past;
    a.settings->draw++;
    c.serial++;
    __threadfence_system();
    *(volatile int *)&mail.serial = c.serial;
}

// --- the peak ---------------------------------------------------------------------------------------------------------

// Is (x, i) before (y, j)? NaN is before everything, higher before lower, the lower id before the higher.
__device__ __forceinline__ bool is_before(float x, int i, float y, int j) {
    bool x_is_nan = x != x, y_is_nan = y != y;
    if (x_is_nan || y_is_nan) return x_is_nan && (!y_is_nan || i < j);
    return x > y || (x == y && i < j);
}

__device__ __forceinline__ void take_first(float &x, int &i, float y, int j) {
    if (is_before(y, j, x, i)) {
        x = y;
        i = j;
    }
}

// The first of all threads' (x, i), in every thread.
__device__ void block_first(float &x, int &i) {
    __shared__ float values[WARP];
    __shared__ int ids[WARP];
#pragma unroll
    for (int lanes = WARP / 2; lanes; lanes /= 2) {
        float y = __shfl_xor_sync(~0u, x, lanes);
        int j = __shfl_xor_sync(~0u, i, lanes);
        take_first(x, i, y, j);
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        values[threadIdx.x / WARP] = x;
        ids[threadIdx.x / WARP] = i;
    }
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / WARP; warp++) take_first(x, i, values[warp], ids[warp]);
}

constexpr int NO_ID = 0x7fffffff;

// Grid: any number of blocks up to BLOCK; the last to finish combines what all found, in their order.
extern "C" __global__ void __launch_bounds__(BLOCK) sample_peak(const __grid_constant__ Sample a) {
    __shared__ float room[WARP];
    __shared__ int is_last;
    let_successor_start();
    wait_for_predecessor();
    int share = (a.n + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share, end = min(a.n, begin + share);
    float peak = -CUDART_INF_F, sum = 0.0f;
    int best = NO_ID;
    for (int i = begin + threadIdx.x; i < end; i += BLOCK) take_first(peak, best, a.logits[i], i);
    block_first(peak, best);
    float reference = peak == -CUDART_INF_F ? 0.0f : peak;
    for (int i = begin + threadIdx.x; i < end; i += BLOCK) sum += expf(a.logits[i] - reference);
    __syncthreads();
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) {
        a.maxima[blockIdx.x] = peak;
        a.sums[blockIdx.x] = sum;
        a.ids[blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(&a.control->ticket, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last) {
        __threadfence();
        bool mine = threadIdx.x < gridDim.x;
        float own = mine ? *(volatile float *)&a.maxima[threadIdx.x] : -CUDART_INF_F;
        peak = own;
        best = NO_ID;
        if (mine) best = *(volatile int *)&a.ids[threadIdx.x];
        block_first(peak, best);
        reference = peak == -CUDART_INF_F ? 0.0f : peak;
        float own_reference = own == -CUDART_INF_F ? 0.0f : own;
        sum = mine ? *(volatile float *)&a.sums[threadIdx.x] * expf(own_reference - reference) : 0.0f;
        __syncthreads();
        sum = block_sum(sum, room);
        if (threadIdx.x == 0) {
            a.control->peak = peak;
            a.control->best = best;
            a.control->log_sum = log(double(sum));
            a.control->ticket = 0;
            if (a.hand_on) hand_on(a, best, 0, nullptr);
        }
    }
}

// --- biases and penalties ---------------------------------------------------------------------------------------------

extern "C" __global__ void sample_copy(float *adjusted, const float *logits, int n) {
    let_successor_start();
    wait_for_predecessor();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) adjusted[i] = logits[i];
}

extern "C" __global__ void sample_adjust(float *adjusted, const float *logits, const Change *changes,
                                         const Settings *settings) {
    let_successor_start();
    wait_for_predecessor();
    const Settings &s = *settings;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < s.n_changes; i += gridDim.x * blockDim.x) {
        Change change = changes[i];
        float logit = logits[change.token];
        double value = logit;
        if (change.has_bias) value = __dadd_rn(value, change.bias);
        if (change.repeats)
            value = value > 0 ? __ddiv_rn(value, s.repeat_penalty) : __dmul_rn(value, s.repeat_penalty);
        if (change.count)
            value = __dsub_rn(value, __dadd_rn(__dmul_rn(change.count, s.frequency_penalty), s.presence_penalty));
        constexpr double largest = 3.4028234663852886e38;
        if (value >= -largest || logit >= -largest)  // minus infinity stays what it is
            adjusted[change.token] = __double2float_rn(value < -largest ? -largest : value > largest ? largest : value);
    }
}

// --- the choice -------------------------------------------------------------------------------------------------------

constexpr double ONE = 1099511627776.0;  // 2^40, the weight of the likeliest token

// floor(2^40 exp((logit - peak) / temperature)): exp(z) = 2^n 2^f, 2^f by its Taylor polynomial in Horner's form.
__device__ uint64_t weight_of(float logit, double peak, double temperature) {
    constexpr double round_to_int = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the integer part in the low bits
    constexpr double log2_e = 1.4426950408889634;
    constexpr double taylor[] = {1.0,
                                 0.6931471805599453,
                                 0.24022650695910072,
                                 0.05550410866482158,
                                 0.009618129107628477,
                                 0.0013333558146428443,
                                 0.0001540353039338161,
                                 1.5252733804059841e-05,
                                 1.321548679014431e-06,
                                 1.01780860092397e-07,
                                 7.054911620801123e-09};
    double x = __dadd_rn(logit, -peak), least = __dmul_rn(-30.0, temperature);
    if (x < least) x = least;  // 2^40 exp(-30) < 1: a weight of zero, and no overflow below
    x = __dmul_rn(__ddiv_rn(x, temperature), log2_e);
    double n = __dadd_rn(x, round_to_int);
    x = __dadd_rn(x, -__dadd_rn(n, -round_to_int));
    double power = __dmul_rn(x, taylor[10] * ONE);
#pragma unroll
    for (int k = 9; k > 0; k--) power = __dmul_rn(__dadd_rn(power, taylor[k] * ONE), x);
    power = __dadd_rn(power, taylor[0] * ONE);
    double scaled = __longlong_as_double(__double_as_longlong(power) + (__double_as_longlong(n) << 52));
    return uint64_t(__double2ll_rz(scaled));
}

__device__ __forceinline__ uint64_t key_of(float logit, int id) {
    uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));  // adding zero makes -0 equal to 0
    if (!(bits >> 31)) bits ^= 0x7fffffff;
    return uint64_t(bits) << 32 | uint32_t(id);
}

__device__ uint64_t random_bits(uint64_t seed, uint64_t step) {  // Philox4x32-10
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32), c0 = uint32_t(step), c1 = uint32_t(step >> 32), c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return uint64_t(c1) << 32 | c0;
}

struct Shared {
    unsigned long long weights[256];
    unsigned counts[256];
    unsigned long long prefix, before;
    unsigned long long sums[BLOCK / WARP];
    uint64_t top[MOST_TOP];
    unsigned n_top;
    int drawn;
};

// The highest key of the shortest ranking prefix whose `needed` is reached: as many tokens where `weigh` is false, their
// weight at temperature 1 where it is true. Only keys up to `limit` count. All threads get it.
__device__ uint64_t select(Shared &s, const float *logits, int n, double peak, uint64_t limit, bool weigh, uint64_t needed) {
    if (threadIdx.x == 0) s.prefix = s.before = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        if (shift == 24) continue;  // ids stay below 2^24
        for (int i = threadIdx.x; i < 256; i += BLOCK) s.counts[i] = s.weights[i] = 0;
        __syncthreads();
        uint64_t prefix = s.prefix, known = shift == 56 ? 0 : ~0ull << (shift + 8);
        for (int i = threadIdx.x; i < n; i += BLOCK) {
            uint64_t key = key_of(logits[i], i);
            if ((key & known) != prefix || key > limit) continue;
            int digit = key >> shift & 255;
            atomicAdd(&s.counts[digit], 1u);
            if (weigh) atomicAdd(&s.weights[digit], (unsigned long long)weight_of(logits[i], peak, 1.0));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            uint64_t sum = s.before;
            int chosen = 0;
            for (int digit = 0; digit < 256; digit++) {
                if (!s.counts[digit]) continue;
                chosen = digit;
                uint64_t more = weigh ? s.weights[digit] : s.counts[digit];
                if (sum + more >= needed) break;
                sum += more;
            }
            s.before = sum;
            s.prefix |= uint64_t(chosen) << shift;
        }
        __syncthreads();
    }
    return s.prefix;
}

// The sum of all threads' x, and in `before` that of the threads before this one.
__device__ uint64_t block_scan(Shared &s, uint64_t x, uint64_t &before) {
    uint64_t sum = x;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        uint64_t other = __shfl_up_sync(~0u, (unsigned long long)sum, lanes);
        if (lane >= lanes) sum += other;
    }
    __syncthreads();
    if (lane == WARP - 1) s.sums[warp] = sum;
    __syncthreads();
    uint64_t total = 0;
    before = sum - x;
    for (int w = 0; w < BLOCK / WARP; w++) {
        if (w < warp) before += s.sums[w];
        total += s.sums[w];
    }
    return total;
}

// Grid: one block.
extern "C" __global__ void __launch_bounds__(BLOCK, 1) sample_choose(const __grid_constant__ Sample a) {
    __shared__ Shared s;
    let_successor_start();
    wait_for_predecessor();
    const Settings &settings = *a.settings;
    const float *x = a.adjusted;
    float highest = -CUDART_INF_F;
    int chosen = NO_ID;
    for (int i = threadIdx.x; i < a.n; i += BLOCK) take_first(highest, chosen, x[i], i);
    block_first(highest, chosen);
    // A broken model's logits are reported, not drawn from.
    bool sound = a.control->peak >= -3.4028234663852886e38f && a.control->peak <= 3.4028234663852886e38f;
    if (sound && !settings.is_greedy) {
        double peak = highest;
        uint64_t limit = ~0ull, least = settings.min_p;
        if (settings.top_k > 0 && settings.top_k < a.n)
            limit = select(s, x, a.n, peak, limit, false, settings.top_k);
        if (settings.is_top_p) {
            uint64_t sum = 0, before;
            for (int i = threadIdx.x; i < a.n; i += BLOCK)
                if (key_of(x[i], i) <= limit) sum += weight_of(x[i], peak, 1.0);
            uint64_t total = block_scan(s, sum, before);
            limit = select(s, x, a.n, peak, limit, true, __umul64hi(total, settings.top_p));
        }
        auto weight = [&](int i) -> uint64_t {
            if (key_of(x[i], i) > limit || (least && weight_of(x[i], peak, 1.0) < least)) return 0;
            return weight_of(x[i], peak, settings.temperature);
        };
        // Each thread adds up its own run of ids; whose run holds the target looks for it there.
        int run = (a.n + BLOCK - 1) / BLOCK, begin = threadIdx.x * run, end = min(a.n, begin + run);
        uint64_t sum = 0, before;
        for (int i = begin; i < end; i++) sum += weight(i);
        uint64_t total = block_scan(s, sum, before);
        uint64_t target = __umul64hi(random_bits(settings.seed, settings.draw), total);
        if (before <= target && target < before + sum)
            for (int i = begin; i < end; i++) {
                before += weight(i);
                if (target < before) {
                    s.drawn = i;
                    break;
                }
            }
        __syncthreads();
        chosen = s.drawn;
    }
    if (threadIdx.x == 0) s.n_top = 0;
    int n_top = min(settings.n_top, a.n);
    if (sound && n_top) {
        uint64_t limit = select(s, a.logits, a.n, 0.0, ~0ull, false, n_top);
        for (int i = threadIdx.x; i < a.n; i += BLOCK) {
            uint64_t key = key_of(a.logits[i], i);
            if (key <= limit && a.logits[i] >= -3.4028234663852886e38f) s.top[atomicAdd(&s.n_top, 1u)] = key;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < s.n_top; i++)
            for (int j = i; j && s.top[j] < s.top[j - 1]; j--) {
                uint64_t key = s.top[j];
                s.top[j] = s.top[j - 1];
                s.top[j - 1] = key;
            }
        hand_on(a, sound ? chosen : a.control->best, s.n_top, s.top);
    }
}
