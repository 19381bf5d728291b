// NEON of every 64-bit Arm: widening multiplies into int16 (a product is at most 127 · 127), added in pairs into int32.
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
  static constexpr int kBlock = 8, kRows = 4;
  struct Int {  // channel c: the sum of two lanes, 2 (c mod 2) and the next, of part[c / 2]
    int32x4_t part[4];
  };
  struct Float {
    float32x4_t low, high;
  };
  struct Weight {
    int8x16_t low, high;
  };

  EDGEC_INLINE Float zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
  EDGEC_INLINE Int start(int32_t) {
    const int32x4_t z = vdupq_n_s32(0);
    return {{z, z, z, z}};
  }
  EDGEC_INLINE Weight load(const uint8_t* p) {
    const int8_t* w = reinterpret_cast<const int8_t*>(p);
    return {vld1q_s8(w), vld1q_s8(w + 16)};
  }
  EDGEC_INLINE Int dot(Int acc, Weight w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const int8x8_t xs = vreinterpret_s8_s32(vdup_n_s32(four));
    acc.part[0] = vpadalq_s16(acc.part[0], vmull_s8(vget_low_s8(w.low), xs));
    acc.part[1] = vpadalq_s16(acc.part[1], vmull_s8(vget_high_s8(w.low), xs));
    acc.part[2] = vpadalq_s16(acc.part[2], vmull_s8(vget_low_s8(w.high), xs));
    acc.part[3] = vpadalq_s16(acc.part[3], vmull_s8(vget_high_s8(w.high), xs));
    return acc;
  }
  EDGEC_INLINE Float add_scaled(Float out, Int acc, float scale) {
    const float32x4_t low = vcvtq_f32_s32(vpaddq_s32(acc.part[0], acc.part[1]));
    const float32x4_t high = vcvtq_f32_s32(vpaddq_s32(acc.part[2], acc.part[3]));
    return {vaddq_f32(out.low, vmulq_n_f32(low, scale)), vaddq_f32(out.high, vmulq_n_f32(high, scale))};
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

const Kernels kNeon = {"neon", kLayout,  matmul, matmul_float, quantize, rms_norm,
                       add,    silu_mul, rotate, store_kv,     attend};

}  // namespace edgec
#endif
