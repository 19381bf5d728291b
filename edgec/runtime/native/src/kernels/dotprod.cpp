// Armv8.2 dot products: SDOT multiplies signed bytes and adds four products into each int32 lane.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>
#include <cstring>

#include "../vector_math.h"
#include "kernels.h"
#include "sets.h"

namespace edgec {
namespace {

constexpr WeightLayout kLayout = {8, 4, 0};

#include "float_kernels.inc"
#include "lanes_neon.inc"
#include "tiles.inc"

struct Traits : Lanes {
  static constexpr int kRows = 8;
  struct Int {
    int32x4_t low, high;
  };

  EDGEC_INLINE Int start(int32_t) { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  EDGEC_INLINE Int dot(Int acc, Weight w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return {vdotq_s32(acc.low, w.low, xs), vdotq_s32(acc.high, w.high, xs)};
  }
  EDGEC_INLINE Float add_scaled(Float out, Int acc, float scale) {
    return Lanes::add_scaled(out, acc.low, acc.high, scale);
  }
};

void matmul(const QuantizedRows& x, const PackedMatrix& w, int begin, int end, float* y, size_t stride) {
  matmul_tiles<Traits>(x, w, begin, end, y, stride);
}

}  // namespace

const Kernels kDotprod = {"dotprod", kLayout,  matmul, matmul_float, quantize, rms_norm,
                          add,       silu_mul, rotate, store_kv,     attend};

}  // namespace edgec
#endif
