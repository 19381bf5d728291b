// AVX-VNNI: the 256-bit VPDPBUSD of client CPUs. See avx512vnni.cpp for the offset of 128.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "../vector_math.h"
#include "kernels.h"
#include "sets.h"

namespace edgec {
namespace {

constexpr WeightLayout kLayout = {8, 4, 128};

#include "float_kernels.inc"
#include "lanes_avx.inc"
#include "tiles.inc"

struct Traits : Lanes {
  using Weight = __m256i;

  EDGEC_INLINE Int start(int32_t offset) { return _mm256_set1_epi32(offset); }
  EDGEC_INLINE Weight load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  EDGEC_INLINE Int dot(Int acc, Weight w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_dpbusd_avx_epi32(acc, w, _mm256_set1_epi32(four));
  }
};

void matmul(const QuantizedRows& x, const PackedMatrix& w, int begin, int end, float* y, size_t stride) {
  matmul_tiles<Traits>(x, w, begin, end, y, stride);
}

}  // namespace

const Kernels kAvxVnni = {"avxvnni", kLayout,  matmul, matmul_float, quantize, rms_norm,
                          add,       silu_mul, rotate, store_kv,     attend};

}  // namespace edgec
#endif
