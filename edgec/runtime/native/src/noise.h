// One random number for each token of a vocabulary, at one position: what a token is drawn by.
//
// The first of racing exponential clocks is an exact draw: with E_t independent and exponentially distributed, the
// token with the least E_t / w_t is t with probability w_t / Σ w (the Gumbel trick, taken through a logarithm). The
// clocks depend on nothing but the request's seed, the position and the token. So a drafter that knows them, and whose
// weights are near the model's, mostly names the very token that the model will draw (Daliri et al., "Coupling without
// Communication and Drafter-Invariant Speculative Decoding", 2024) – at any temperature, and without changing it.
//
//   key = the first two words of Philox4x32-10 at Draw::kToken
//   x   = mix(mix(token · 0x9E3779B9 + key₀) + key₁), mix being Wellons' 32-bit hash below, all modulo 2³²
//   E   = −ln(1 − (x + ½) / 2³²)
//
// Everything is forced inline: this file is compiled for several instruction sets, and the linker must not mix them.
#ifndef EDGEC_NOISE_H
#define EDGEC_NOISE_H

#include <cstdint>
#include <cstring>

#include "vector_math.h"

namespace edgec {

struct NoiseKey {
  uint32_t words[2];
};

// Of N numbers each, or vectors of them, side by side: of one alone, each operation waits for the one before it.
template <typename Uints, int N>
EDGEC_INLINE void noise_mix(Uints (&x)[N]) {
  for (Uints& v : x) v ^= v >> 16;
  for (Uints& v : x) v *= 0x21F0AAADu;
  for (Uints& v : x) v ^= v >> 15;
  for (Uints& v : x) v *= 0x735A2D97u;
  for (Uints& v : x) v ^= v >> 15;
}

// Tokens become bits.
template <typename Uints, int N>
EDGEC_INLINE void noise_bits(const NoiseKey& key, Uints (&token)[N]) {
  for (Uints& v : token) v = v * 0x9E3779B9u + key.words[0];
  noise_mix(token);
  for (Uints& v : token) v += key.words[1];
  noise_mix(token);
}

EDGEC_INLINE uint32_t noise_bits(const NoiseKey& key, uint32_t token) {
  uint32_t one[1] = {token};
  noise_bits(key, one);
  return one[0];
}

// E of its bits. The logarithm is written here because libraries differ in the last bit: with 1 − x = m · 2ᵉ and m
// around 1, ln m = 2 artanh((m − 1) / (m + 1)).
EDGEC_INLINE double noise_time(uint32_t bits) {
  double m = 1.0 - (static_cast<double>(bits) + 0.5) * (1.0 / 4294967296.0);  // exact
  uint64_t raw;
  std::memcpy(&raw, &m, sizeof(raw));
  int32_t e = static_cast<int32_t>(raw >> 52) - 1023;
  raw = (raw & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;  // m in [1, 2)
  std::memcpy(&m, &raw, sizeof(m));
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double sum = 1.0 / 21;
  for (int k = 19; k >= 1; k -= 2) sum = sum * z + 1.0 / k;
  return -(e * 0.69314718055994531 + 2.0 * s * sum);
}

}  // namespace edgec

#endif  // EDGEC_NOISE_H
