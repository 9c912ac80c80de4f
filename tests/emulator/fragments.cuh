// kernels/fragments.cuh for the host.
#pragma once

inline void load_matrices(unsigned (&r)[4], const half *row) {
    int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; m++) {
        const half *p = row;
        for (int lane_of_row = 0; lane_of_row < 8; lane_of_row++) {
            const half *q = exchange(p, m * 8 + lane_of_row);
            if (lane_of_row == lane / 4) memcpy(&r[m], q + lane % 4 * 2, 4);
        }
    }
}
inline void load_matrices_transposed(unsigned (&r)[4], const half *row) {
    int lane = threadIdx.x % 32;
    for (int m = 0; m < 4; m++)
        for (int source = 0; source < 8; source++) {
            const half *q = exchange(row, m * 8 + source);
            if (source / 2 == lane % 4) memcpy((half *)&r[m] + source % 2, q + lane / 4, 2);
        }
}
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    int lane = threadIdx.x % 32;
    struct Pair { half x[2]; };
    auto get = [](unsigned bits, int i) { half2 h; memcpy(&h, &bits, 4); return float(i ? h.y : h.x); };
    float A[2][16], B[16][2];  // this lane's two rows of a and two columns of b
    for (int quad = 0; quad < 4; quad++)
        for (int part = 0; part < 4; part++) {
            unsigned bits = exchange(a[part], lane / 4 * 4 + quad);
            for (int i = 0; i < 2; i++) A[part % 2][part / 2 * 8 + quad * 2 + i] = get(bits, i);
        }
    for (int column = 0; column < 2; column++)
        for (int quad = 0; quad < 4; quad++) {
            int from = (lane % 4 * 2 + column) * 4 + quad;
            unsigned low = exchange(b0, from), high = exchange(b1, from);
            for (int i = 0; i < 2; i++) {
                B[quad * 2 + i][column] = get(low, i);
                B[8 + quad * 2 + i][column] = get(high, i);
            }
        }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) c[i] += A[i / 2][k] * B[k][i % 2];
}
inline unsigned pack(float low, float high) {
    half2 pair = __floats2half2_rn(low, high);
    unsigned bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
