// AVX2 without VNNI: VPMADDUBSW saturates when unsigned bytes above 128 meet signed ones, so it gets |w| and x with the
// sign of w: a pair of products is at most 2 · 127 · 127 = 32258, and every sum is exact.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "../vector_math.h"
#include "kernels.h"
#include "sets.h"

namespace edgec {
namespace {

constexpr WeightLayout kLayout = {8, 4, 0};

#include "float_kernels.inc"
#include "lanes_avx.inc"
#include "tiles.inc"

struct Traits : Lanes {
  struct Weight {
    __m256i value, magnitude;
  };

  EDGEC_INLINE Int start(int32_t) { return _mm256_setzero_si256(); }
  EDGEC_INLINE Weight load(const uint8_t* p) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {value, _mm256_abs_epi8(value)};
  }
  EDGEC_INLINE Int dot(Int acc, Weight w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(_mm256_set1_epi32(four), w.value));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

void matmul(const QuantizedRows& x, const PackedMatrix& w, int begin, int end, float* y, size_t stride) {
  matmul_tiles<Traits>(x, w, begin, end, y, stride);
}

}  // namespace

const Kernels kAvx2 = {"avx2", kLayout,  matmul, matmul_float, quantize, rms_norm,
                       add,    silu_mul, rotate, store_kv,     attend};

}  // namespace edgec
#endif
