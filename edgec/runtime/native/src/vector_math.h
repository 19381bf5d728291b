// Float arithmetic that gives the same bits on every CPU and at every vector width.
//
// Vectors are GCC and Clang vector types: each operation is IEEE 754 single precision, lane by lane, whatever the
// machine has. Multiplications and additions are never fused (-ffp-contract=off). Sums run over eight lanes, lane i
// taking the elements i, i + 8, …, and the lanes are added in one fixed order. exp and log are polynomials written
// here, because libraries differ in the last bit. Everything is forced inline: this file is compiled for several
// instruction sets, and the linker must not mix their copies.
#ifndef EDGEC_MATH_H
#define EDGEC_MATH_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EDGEC_INLINE static inline __attribute__((always_inline, unused))

namespace edgec {

typedef float Vec8 __attribute__((vector_size(32)));
typedef int32_t Int8x32 __attribute__((vector_size(32)));  // eight int32 lanes
typedef float Vec16 __attribute__((vector_size(64)));
typedef int32_t Int16x32 __attribute__((vector_size(64)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef int32_t Int4x32 __attribute__((vector_size(16)));

EDGEC_INLINE Vec8 load8(const float* p) {
  Vec8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

EDGEC_INLINE void store8(float* p, Vec8 v) { std::memcpy(p, &v, sizeof(v)); }

EDGEC_INLINE Vec8 splat8(float x) { return Vec8{x, x, x, x, x, x, x, x}; }

// The first `count` (< 8) of eight floats; the other lanes are `fill`.
EDGEC_INLINE Vec8 load_part8(const float* p, size_t count, float fill) {
  Vec8 v = splat8(fill);
  for (size_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

// Eight INT8 values as float, exactly. Compilers take a conversion from an eight-byte vector apart, byte by byte.
EDGEC_INLINE Vec8 load_int8(const int8_t* p) {
#if defined(__AVX2__)
  int64_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return (Vec8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
#elif defined(__aarch64__)
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  const float32x4_t half[2] = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
  Vec8 v;
  std::memcpy(&v, half, sizeof(v));
  return v;
#else
  Vec8 v;
  for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}

// Eight integers within ±127 as bytes, for the same reason.
EDGEC_INLINE void store_int8(int8_t* p, Int8x32 v) {
#if defined(__AVX2__)
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  const int64_t bytes = _mm_cvtsi128_si64(_mm_packs_epi16(words, words));
  std::memcpy(p, &bytes, sizeof(bytes));
#elif defined(__aarch64__)
  int32x4_t half[2];
  std::memcpy(half, &v, sizeof(v));
  vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(half[0]), vmovn_s32(half[1]))));
#else
  for (int i = 0; i < 8; ++i) p[i] = static_cast<int8_t>(v[i]);
#endif
}

// The greater of each pair of lanes; `b` where one is no number. In halves for the reason that exp8 gives.
EDGEC_INLINE Vec8 max8(Vec8 a, Vec8 b) {
#if defined(__AVX2__)
  return (Vec8)_mm256_max_ps((__m256)a, (__m256)b);  // what the comparison says, which compilers miss
#else
  Vec4 x[2], y[2];
  std::memcpy(x, &a, sizeof(a));
  std::memcpy(y, &b, sizeof(b));
  x[0] = x[0] > y[0] ? x[0] : y[0];
  x[1] = x[1] > y[1] ? x[1] : y[1];
  std::memcpy(&a, x, sizeof(a));
  return a;
#endif
}

// The one order in which lanes are added: (0+4 + 2+6) + (1+5 + 3+7).
EDGEC_INLINE float add_lanes(Vec8 v) {
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return v[0] + v[1];
}

EDGEC_INLINE int32_t add_lanes(Int8x32 v) {
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return v[0] + v[1];
}

EDGEC_INLINE float max_lanes(Vec8 v) {
  v = max8(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max8(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return v[0] > v[1] ? v[0] : v[1];
}

// Σ x[i].
EDGEC_INLINE float sum8(const float* x, size_t count) {
  Vec8 acc = splat8(0.0f);
  size_t i = 0;
  for (; i + 8 <= count; i += 8) acc += load8(x + i);
  if (i < count) acc += load_part8(x + i, count - i, 0.0f);
  return add_lanes(acc);
}

// `x` within [low, high]; NaN stays. Compilers don't make the processor's minimum and maximum of such comparisons.
template <typename Floats>
EDGEC_INLINE Floats clamp_lanes(Floats x, Floats low, Floats high) {
  x = x > high ? high : x;
  return x < low ? low : x;
}
#if defined(__AVX2__)
EDGEC_INLINE Vec8 clamp_lanes(Vec8 x, Vec8 low, Vec8 high) {
  return max8(low, (Vec8)_mm256_min_ps((__m256)high, (__m256)x));
}
#endif
#if defined(__AVX512F__)
EDGEC_INLINE Vec16 clamp_lanes(Vec16 x, Vec16 low, Vec16 high) {
  return (Vec16)_mm512_max_ps((__m512)low, _mm512_min_ps((__m512)high, (__m512)x));
}
#endif

// e^x within 2 ulp; 0 below −87.3, and the greatest finite value's neighbourhood above 88. N vectors side by side: of
// one alone, each operation waits for the one before it.
template <typename Floats, typename Ints, int N>
EDGEC_INLINE void exp_lanes(Floats (&x)[N]) {
  const Floats zero = {};
  const Floats low = zero + -87.33654f, high = zero + 88.02969f;
  const Floats magic = zero + 12582912.0f;  // 1.5 · 2²³: adding it rounds to an integer
  Ints under[N];
  Floats n[N], p[N];
  for (int i = 0; i < N; ++i) under[i] = x[i] < low;
  for (int i = 0; i < N; ++i) x[i] = clamp_lanes(x[i], low, high);
  for (int i = 0; i < N; ++i) n[i] = (x[i] * 1.44269504088896341f + magic) - magic;
  for (int i = 0; i < N; ++i) x[i] = x[i] - n[i] * 0.693359375f;
  for (int i = 0; i < N; ++i) x[i] = x[i] - n[i] * -2.12194440e-4f;
  // Cephes' minimax polynomial for e^r on |r| ≤ ln(2) / 2.
  for (int i = 0; i < N; ++i) p[i] = zero + 1.9875691500e-4f;
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  for (const float term : kTerms)
    for (int i = 0; i < N; ++i) p[i] = p[i] * x[i] + term;
  for (int i = 0; i < N; ++i) p[i] = p[i] * (x[i] * x[i]) + x[i] + 1.0f;
  for (int i = 0; i < N; ++i) {
    const Ints exponent = (__builtin_convertvector(n[i], Ints) + 127) << 23;
    Floats power;
    std::memcpy(&power, &exponent, sizeof(power));
    p[i] = p[i] * power;
  }
  for (int i = 0; i < N; ++i) x[i] = under[i] ? zero : p[i];
}

// Without 256-bit registers a compiler takes comparisons of eight lanes apart, one by one; of four it does not.
EDGEC_INLINE Vec8 exp8(Vec8 x) {
#if defined(__AVX2__)
  Vec8 one[1] = {x};
  exp_lanes<Vec8, Int8x32>(one);
  return one[0];
#else
  Vec4 half[2];
  std::memcpy(half, &x, sizeof(x));
  exp_lanes<Vec4, Int4x32>(half);
  std::memcpy(&x, half, sizeof(x));
  return x;
#endif
}

EDGEC_INLINE float exp_f32(float x) { return exp8(splat8(x))[0]; }

// Natural logarithm within 2 ulp of positive normal numbers; −87.34 for anything smaller.
EDGEC_INLINE float log_f32(float x) {
  if (!(x > 1.17549435e-38f)) return -87.3365f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  int32_t e = static_cast<int32_t>(bits >> 23) - 126;
  bits = (bits & 0x007fffffu) | 0x3f000000u;  // mantissa in [0.5, 1)
  float m;
  std::memcpy(&m, &bits, 4);
  if (m < 0.707106781186547524f) {
    e -= 1;
    m = m + m - 1.0f;
  } else {
    m = m - 1.0f;
  }
  const float z = m * m, n = static_cast<float>(e);
  float y = 7.0376836292e-2f;
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z;
  y = y + n * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (m + y) + n * 0.693359375f;
}

}  // namespace edgec

#endif  // EDGEC_MATH_H
