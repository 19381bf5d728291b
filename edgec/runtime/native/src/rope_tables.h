// cos and sin of rotary positions, with the same bits everywhere: computed in double from + − × and comparisons alone.
#ifndef EDGEC_ROPE_TABLES_H
#define EDGEC_ROPE_TABLES_H

#include <vector>

namespace edgec {

struct RopeTables {
  int half;                // head_dim / 2
  std::vector<float> cos;  // (positions, half)
  std::vector<float> sin;

  // Angle = position · frequencies[i], a float32 product as in PyTorch; `factor` multiplies both tables.
  RopeTables(const float* frequencies, int half, int positions, float factor);
};

// Of |x| < 2²⁰, within 1e-15.
void sin_cos(double x, double* sin, double* cos);

}  // namespace edgec

#endif  // EDGEC_ROPE_TABLES_H
