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
#include "lanes_neon.inc"
#include "tiles.inc"

struct Traits : Lanes {
  static constexpr int kRows = 4;
  struct Int {  // channel c: the sum of two lanes, 2 (c mod 2) and the next, of part[c / 2]
    int32x4_t part[4];
  };

  EDGEC_INLINE Int start(int32_t) {
    const int32x4_t z = vdupq_n_s32(0);
    return {{z, z, z, z}};
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
    return Lanes::add_scaled(out, vpaddq_s32(acc.part[0], acc.part[1]), vpaddq_s32(acc.part[2], acc.part[3]), scale);
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
