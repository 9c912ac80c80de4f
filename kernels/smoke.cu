// The smallest kernels: does this device run what was compiled for it, and do arguments of every width arrive?
//
//     axpy:  y[i] = a * x[i] + y[i]      x, y: n elements, contiguous; any grid and block (grid-stride loop)
//
// smoke_arguments writes each argument, widened to a 64-bit word, to out[0..7], so that the host's packing is checked
// against the compiler's layout: one thread.

struct Five {
    int words[5];
};

template <typename T>
__device__ void axpy(int n, T a, const T *x, T *y) {
    int stride = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void smoke_axpy_f32(int n, float a, const float *x, float *y) { axpy(n, a, x, y); }

extern "C" __global__ void smoke_axpy_i32(int n, int a, const int *x, int *y) { axpy(n, a, x, y); }

extern "C" __global__ void smoke_arguments(signed char a, unsigned short b, int c, long long d, float e, double f,
                                           Five g, long long *out) {
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
    out[4] = __float_as_int(e);
    out[5] = __double_as_longlong(f);
    out[6] = g.words[0];
    out[7] = g.words[4];
}
