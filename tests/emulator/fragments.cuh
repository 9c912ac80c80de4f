// kernels/fragments.cuh for the host.
#pragma once

// What every lane of the warp gives, to all.
template <class T>
struct Given {
    T of[32];
    explicit Given(const T &x) {
        static_assert(sizeof(T) <= 32);
        unsigned char *slots = (unsigned char *)warp_slots();
        memcpy(slots + threadIdx.x % 32 * 32, &x, sizeof x);
        __syncwarp();
        for (int lane = 0; lane < 32; lane++) memcpy(&of[lane], slots + lane * 32, sizeof(T));
        __syncwarp();
    }
};

inline void load_matrices(unsigned (&r)[4], const half *row) {
    int lane = threadIdx.x % 32;
    Given<const half *> rows(row);
    for (int m = 0; m < 4; m++) memcpy(&r[m], rows.of[m * 8 + lane / 4] + lane % 4 * 2, 4);
}
inline void load_matrices_transposed(unsigned (&r)[4], const half *row) {
    int lane = threadIdx.x % 32;
    Given<const half *> rows(row);
    for (int m = 0; m < 4; m++)
        for (int i = 0; i < 2; i++) memcpy((half *)&r[m] + i, rows.of[m * 8 + lane % 4 * 2 + i] + lane / 4, 2);
}
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct A { float x[4][2]; } a_here;
    struct B { float x[2][2]; } b_here;
    auto widen = [](float (&to)[2], unsigned pair) {
        half2 x;
        memcpy(&x, &pair, 4);
        to[0] = float(x.x), to[1] = float(x.y);
    };
    for (int i = 0; i < 4; i++) widen(a_here.x[i], a[i]);
    widen(b_here.x[0], b0), widen(b_here.x[1], b1);
    Given<A> rows(a_here);
    Given<B> columns(b_here);
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const A &row = rows.of[lane / 4 * 4 + k % 8 / 2];
            const B &column = columns.of[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2];
            c[i] += row.x[i / 2 + k / 8 * 2][k % 2] * column.x[k / 8][k % 2];
        }
}
inline unsigned pack(float low, float high) {
    half2 pair = __floats2half2_rn(low, high);
    unsigned bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
