// Plain C++: the definition that every other kernel set must equal, bit for bit.
#include <cmath>
#include <cstring>

#include "../vector_math.h"
#include "kernels.h"
#include "sets.h"

namespace edgec {
namespace {

constexpr WeightLayout kLayout = {8, 4, 0};

#include "float_kernels.inc"

void matmul(const QuantizedRows& x, const PackedMatrix& w, int begin, int end, float* y, size_t stride) {
  const int groups = x.k / kGroup;
  for (int block = begin; block < end; ++block) {
    const int8_t* packed = reinterpret_cast<const int8_t*>(w.data) + static_cast<size_t>(block) * 8 * w.k;
    const int count = w.n - block * 8 < 8 ? w.n - block * 8 : 8;
    for (int r = 0; r < x.rows; ++r) {
      float out[8] = {};
      for (int g = 0; g < groups; ++g) {
        int32_t acc[8] = {};
        for (int k = g * kGroup; k < (g + 1) * kGroup; ++k)
          for (int n = 0; n < 8; ++n) acc[n] += *x.at(r, k, 4) * packed[(k / 4 * 8 + n) * 4 + k % 4];
        const float scale = x.scales[static_cast<size_t>(g) * x.rows + r];
        for (int n = 0; n < 8; ++n) out[n] += static_cast<float>(acc[n]) * scale;
      }
      for (int n = 0; n < count; ++n) {
        float value = out[n] * w.scales[block * 8 + n];
        if (w.bias != nullptr) value += w.bias[block * 8 + n];
        y[r * stride + block * 8 + n] = value;
      }
    }
  }
}

}  // namespace

const Kernels kScalar = {"scalar", kLayout,  matmul, matmul_float, quantize, rms_norm,
                         add,      silu_mul, rotate, store_kv,     attend};

}  // namespace edgec
