// Armv8.6 matrix products: SMMLA multiplies two rows of eight signed bytes by two channels of eight, into 2 × 2 int32.
// Rows go in pairs; a single last row is paired with itself, and its second result dropped.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>
#include <cstring>

#include "../vector_math.h"
#include "kernels.h"
#include "sets.h"

namespace edgec {
namespace {

constexpr WeightLayout kLayout = {8, 8, 0};

#include "float_kernels.inc"

constexpr int kBlock = 8;

// Row pairs (first, first + 1), …: P of them. acc[p][c]: rows of pair p × channels 2c and 2c + 1, row by row.
template <int P>
EDGEC_INLINE void tile(const QuantizedRows& x, int first, int rows, const PackedMatrix& w, int block, float* y,
                       size_t stride) {
  const int groups = x.k / kGroup;
  const int8_t* packed = reinterpret_cast<const int8_t*>(w.data) + static_cast<size_t>(block) * kBlock * w.k;
  int row[2 * P];
  float32x4_t out[P][4];
  for (int p = 0; p < P; ++p) {
    row[2 * p] = first + 2 * p;
    row[2 * p + 1] = 2 * p + 1 < rows ? first + 2 * p + 1 : first + 2 * p;
    for (int c = 0; c < 4; ++c) out[p][c] = vdupq_n_f32(0.0f);
  }
  for (int g = 0; g < groups; ++g) {
    int32x4_t acc[P][4];
    for (int p = 0; p < P; ++p)
      for (int c = 0; c < 4; ++c) acc[p][c] = vdupq_n_s32(0);
    for (int k = g * kGroup; k < (g + 1) * kGroup; k += 8) {
      int8x16_t weight[4];
      for (int c = 0; c < 4; ++c) weight[c] = vld1q_s8(packed + 16 * c);
      packed += kBlock * 8;
      for (int p = 0; p < P; ++p) {
        const int8x16_t xs = vcombine_s8(vld1_s8(x.at(row[2 * p], k, 8)), vld1_s8(x.at(row[2 * p + 1], k, 8)));
        for (int c = 0; c < 4; ++c) acc[p][c] = vmmlaq_s32(acc[p][c], xs, weight[c]);
      }
    }
    for (int p = 0; p < P; ++p) {
      const float32x4_t scale = vcombine_f32(vdup_n_f32(x.scales[static_cast<size_t>(g) * x.rows + row[2 * p]]),
                                             vdup_n_f32(x.scales[static_cast<size_t>(g) * x.rows + row[2 * p + 1]]));
      for (int c = 0; c < 4; ++c) out[p][c] = vaddq_f32(out[p][c], vmulq_f32(vcvtq_f32_s32(acc[p][c]), scale));
    }
  }
  const int count = w.n - block * kBlock < kBlock ? w.n - block * kBlock : kBlock;
  for (int i = 0; i < rows; ++i) {
    float value[kBlock];
    for (int c = 0; c < 4; ++c) {
      float four[4];
      vst1q_f32(four, out[i / 2][c]);
      for (int lane = 0; lane < 2; ++lane) {
        const int n = 2 * c + lane;
        value[n] = four[2 * (i % 2) + lane] * w.scales[block * kBlock + n];
        if (w.bias != nullptr) value[n] += w.bias[block * kBlock + n];
      }
    }
    std::memcpy(y + static_cast<size_t>(first + i) * stride + block * kBlock, value, sizeof(float) * count);
  }
}

void matmul(const QuantizedRows& x, const PackedMatrix& w, int begin, int end, float* y, size_t stride) {
  for (int block = begin; block < end; ++block) {
    int r = 0;
    for (; r + 8 <= x.rows; r += 8) tile<4>(x, r, 8, w, block, y, stride);
    if (r + 4 <= x.rows) {
      tile<2>(x, r, 4, w, block, y, stride);
      r += 4;
    }
    for (; r < x.rows; r += 2) tile<1>(x, r, x.rows - r < 2 ? 1 : 2, w, block, y, stride);
  }
}

}  // namespace

const Kernels kI8mm = {"i8mm", kLayout,  matmul, matmul_float, quantize, rms_norm,
                       add,    silu_mul, rotate, store_kv,     attend};

}  // namespace edgec
#endif
