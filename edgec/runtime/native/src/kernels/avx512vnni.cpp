// AVX-512 VNNI: VPDPBUSD multiplies unsigned bytes by signed ones into int32 without saturating. Weights are stored as
// w + 128; what that adds, 128 · Σ x, is taken off where each group starts.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "../vector_math.h"
#include "kernels.h"
#include "sets.h"

namespace edgec {
namespace {

constexpr WeightLayout kLayout = {16, 4, 128};

#include "float_kernels.inc"
#include "tiles.inc"

struct Traits {
  static constexpr int kBlock = 16, kRows = 8;
  using Int = __m512i;
  using Float = __m512;
  using Weight = __m512i;

  EDGEC_INLINE Float zero() { return _mm512_setzero_ps(); }
  EDGEC_INLINE Int start(int32_t offset) { return _mm512_set1_epi32(offset); }
  EDGEC_INLINE Weight load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  EDGEC_INLINE Int dot(Int acc, Weight w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
  }
  EDGEC_INLINE Float add_scaled(Float out, Int acc, float scale) {
    return _mm512_add_ps(out, _mm512_mul_ps(_mm512_cvtepi32_ps(acc), _mm512_set1_ps(scale)));
  }
  EDGEC_INLINE Float finish(Float out, const float* scales, const float* bias) {
    const Float value = _mm512_mul_ps(out, _mm512_loadu_ps(scales));
    return bias == nullptr ? value : _mm512_add_ps(value, _mm512_loadu_ps(bias));
  }
  EDGEC_INLINE void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
};

void matmul(const QuantizedRows& x, const PackedMatrix& w, int begin, int end, float* y, size_t stride) {
  matmul_tiles<Traits>(x, w, begin, end, y, stride);
}

}  // namespace

const Kernels kAvx512Vnni = {"avx512vnni", kLayout,  matmul, matmul_float, quantize, rms_norm,
                             add,          silu_mul, rotate, store_kv,     attend};

}  // namespace edgec
#endif
