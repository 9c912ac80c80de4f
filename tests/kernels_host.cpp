// kernels/dequant.cuh on the host, for tests/test_kernels_host.py: blocks in, float32 out, plus what the kernels rely on.
#include "dequant.cuh"

using namespace reflex;

template <class Format>
static void blocks(const uint8_t* in, long n, float* out) {
  for (long b = 0; b < n; ++b) {
    for (int p = 0; p < pieces<Format>; ++p) dequantise<Format>(in + b * Format::bytes, p, out + b * Format::elements);
  }
}

// Largest |value| that a Raw of zeros decodes to: what lanes beyond the end of a row compute with.
template <class Format>
static float of_nothing() {
  float most = 0;
  for (int p = 0; p < pieces<Format>; ++p) {
    typename Format::Raw raw;
    memset(&raw, 0, sizeof raw);
    RunsOf<Format> runs;
    Format::decode(raw, p, runs);
    for (int r = 0; r < Format::runs; ++r) {
      for (int i = 0; i < 16; ++i) {
        const int g = r / Format::group;
        const float v = value(level<Format>(runs, r, i), runs.scale[g], runs.offset[g]);
        if (!(v <= most && -v <= most)) most = v < 0 ? -v : v;
      }
    }
  }
  return most;
}

struct Facts {
  int elements, bytes, zero, greatest, has_offset, is_signed, piece, rows;
};

#define FORMAT(F)                                                                                    \
  extern "C" void blocks_##F(const uint8_t* in, long n, float* out) { blocks<F>(in, n, out); }        \
  extern "C" float of_nothing_##F() { return of_nothing<F>(); }                                       \
  extern "C" Facts facts_##F() { return {F::elements, F::bytes, F::zero, F::greatest, F::has_offset, F::is_signed, 16 * F::runs, rows_at_once<F>}; }

FORMAT(Q4_0) FORMAT(Q4_1) FORMAT(Q5_0) FORMAT(Q5_1) FORMAT(Q8_0)
FORMAT(Q2_K) FORMAT(Q3_K) FORMAT(Q4_K) FORMAT(Q5_K) FORMAT(Q6_K)
FORMAT(IQ4_NL) FORMAT(IQ4_XS) FORMAT(MXFP4) FORMAT(NVFP4)
FORMAT(Q1_0) FORMAT(Q2_0) FORMAT(TQ1_0) FORMAT(TQ2_0)
FORMAT(IQ2_XXS) FORMAT(IQ2_XS) FORMAT(IQ2_S) FORMAT(IQ3_XXS) FORMAT(IQ3_S) FORMAT(IQ1_S) FORMAT(IQ1_M)
