// kernels/mma.cuh for the host. Numbers of a fragment are where its header says; what the lanes of a warp hold is
// exchanged at once.
#pragma once

#include "copy.cuh"

namespace reflex {

inline float half_of(uint32_t pair, int i) {
    half2 h;
    memcpy(&h, &pair, 4);
    return float(i ? h.y : h.x);
}
inline uint32_t pack_halves(float low, float high) {
    half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
    return pack_halves(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
    return pack_halves(half_of(a, 0) - half_of(b, 0), half_of(a, 1) - half_of(b, 1));
}
inline uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {  // once rounded: products of halves are exact in double
    half2 pair = {half(double(half_of(a, 0)) * half_of(b, 0) + half_of(c, 0)),
                  half(double(half_of(a, 1)) * half_of(b, 1) + half_of(c, 1))};
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Part { uint32_t a[4], b[2]; };
    auto *slots = (unsigned char(*)[32])warp_slots();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Part mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    memcpy(slots[lane], &mine, sizeof mine);
    __syncwarp();
    auto of = [&](int from) { return (const Part *)slots[from]; };
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            int quad = k % 8 / 2, upper = k / 8;
            c[i] += half_of(of(4 * g + quad)->a[i / 2 + 2 * upper], k % 2) *
                    half_of(of(4 * (2 * t + i % 2) + quad)->b[upper], k % 2);
        }
    __syncwarp();
}

inline void mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) { mma(c, {a0, a1, 0, 0}, b, 0); }

#ifdef EMULATED_GROUPS
constexpr bool has_groups = true;
#else
constexpr bool has_groups = false;
#endif
inline void group_begin() {}
inline void group_commit() {}
template <int pending>
void group_wait() {}
inline void group_keep(uint32_t &) {}
inline uint64_t group_operand(uint32_t address, uint32_t leading) { return address / 16 | uint64_t(leading) << 32; }
template <int n>
void group_multiply(float (&c)[n][4], const uint32_t (&a)[4], uint64_t b, bool is_first) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int j = 0; j < n; j++) {
        if (is_first) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
        const unsigned char *from = emulated_shared + 16 * uint32_t(b) + (8 * j + g) * 16 + 4 * t;
        uint32_t b0, b1;
        memcpy(&b0, from, 4);
        memcpy(&b1, from + (b >> 32), 4);
        mma(c[j], a, b0, b1);
    }
}

// Of each of four matrices the two halves that are this lane's.
template <bool transposed>
void load_eights(uint32_t (&r)[4], const void *row) {
    auto *slots = (unsigned char(*)[32])warp_slots();
    int lane = threadIdx.x % 32;
    memcpy(slots[lane], &row, sizeof row);
    __syncwarp();
    for (int m = 0; m < 4; m++)
        for (int i = 0; i < 2; i++) {
            int from = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
            const half *begin;
            memcpy(&begin, slots[8 * m + from], sizeof begin);
            memcpy((half *)&r[m] + i, begin + column, 2);
        }
    __syncwarp();
}
inline void load_matrices(uint32_t (&r)[4], const void *row) { load_eights<false>(r, row); }
inline void load_matrices(uint32_t (&r)[4], uint32_t address) { load_matrices(r, emulated_shared + address); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void *row) { load_eights<true>(r, row); }

inline uint4 load_now(const uint4 *p) { return *p; }

}  // namespace reflex
