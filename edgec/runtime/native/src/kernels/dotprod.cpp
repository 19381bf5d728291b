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
#include "tiles.inc"

struct Traits {
  static constexpr int kBlock = 8, kRows = 8;
  struct Int {
    int32x4_t low, high;
  };
  struct Float {
    float32x4_t low, high;
  };
  struct Weight {
    int8x16_t low, high;
  };

  EDGEC_INLINE Float zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
  EDGEC_INLINE Int start(int32_t) { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  EDGEC_INLINE Weight load(const uint8_t* p) {
    const int8_t* w = reinterpret_cast<const int8_t*>(p);
    return {vld1q_s8(w), vld1q_s8(w + 16)};
  }
  EDGEC_INLINE Int dot(Int acc, Weight w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return {vdotq_s32(acc.low, w.low, xs), vdotq_s32(acc.high, w.high, xs)};
  }
  EDGEC_INLINE Float add_scaled(Float out, Int acc, float scale) {
    return {vaddq_f32(out.low, vmulq_n_f32(vcvtq_f32_s32(acc.low), scale)),
            vaddq_f32(out.high, vmulq_n_f32(vcvtq_f32_s32(acc.high), scale))};
  }
  EDGEC_INLINE Float finish(Float out, const float* scales, const float* bias) {
    Float value = {vmulq_f32(out.low, vld1q_f32(scales)), vmulq_f32(out.high, vld1q_f32(scales + 4))};
    if (bias != nullptr) value = {vaddq_f32(value.low, vld1q_f32(bias)), vaddq_f32(value.high, vld1q_f32(bias + 4))};
    return value;
  }
  EDGEC_INLINE void store(float* p, Float v) {
    vst1q_f32(p, v.low);
    vst1q_f32(p + 4, v.high);
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
