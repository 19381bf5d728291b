#include "rope_tables.h"

#include <cstddef>

namespace edgec {

void sin_cos(double x, double* sin, double* cos) {
  // x − n · π/2 in three pieces of π/2 (fdlibm's, 33 bits each, so that n times the first two is exact).
  constexpr double kTwoOverPi = 6.36619772367581382433e-01, kMagic = 6755399441055744.0;  // 1.5 · 2⁵²
  constexpr double kFirst = 1.57079632673412561417e+00, kSecond = 6.07710050630396597660e-11;
  constexpr double kThird = 2.02226624879595063154e-21;
  const double n = (x * kTwoOverPi + kMagic) - kMagic;
  const double r = ((x - n * kFirst) - n * kSecond) - n * kThird;
  const double z = r * r;
  // Taylor's series to r¹⁷ and r¹⁶: on |r| ≤ π/4 the rest is below 1e-17.
  double s = 1.0 / 355687428096000.0;
  s = s * z - 1.0 / 1307674368000.0;
  s = s * z + 1.0 / 6227020800.0;
  s = s * z - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  s = r + r * z * s;
  double c = 1.0 / 20922789888000.0;
  c = c * z - 1.0 / 87178291200.0;
  c = c * z + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * z - 0.5;
  c = 1.0 + z * c;
  const int quadrant = static_cast<int>(n) & 3;
  *sin = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
  *cos = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
}

RopeTables::RopeTables(const float* frequencies, int half_dim, int positions, float factor) : half(half_dim) {
  const size_t count = static_cast<size_t>(positions) * half;
  cos.resize(count);
  sin.resize(count);
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * frequencies[i];
      double s, c;
      sin_cos(angle, &s, &c);
      sin[static_cast<size_t>(p) * half + i] = static_cast<float>(s) * factor;
      cos[static_cast<size_t>(p) * half + i] = static_cast<float>(c) * factor;
    }
  }
}

}  // namespace edgec
