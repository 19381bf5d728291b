// Random numbers from a counter: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
//
// A draw depends on nothing but the request's seed and where it is drawn, so batch-mates, preemption and rolled-back
// drafts can't disturb it, and the reference server draws the same numbers:
//
//   key     = (seed mod 2³², seed ÷ 2³²)
//   counter = (sequence, position, draw, 0)   sequence: 0 … n − 1; position: of the token that is drawn, in its
//                                             sequence, prompt included; draw: which of the draws at that position
//   u       = ((r0 >> 5) · 2²⁶ + (r1 >> 6)) / 2⁵³    in [0, 1), from the first two output words
#ifndef EDGEC_PHILOX_H_
#define EDGEC_PHILOX_H_

#include <array>
#include <cstdint>

#include "noise.h"

namespace edgec {

// What the draws at one position are for. Values are part of the contract with the reference server.
enum class Draw : uint32_t {
  kToken = 0,     // the token itself, from the target's processed distribution: the key of its noise (noise.h)
  kDraft = 1,     // the draft's token
  kAccept = 2,    // whether the draft's token is accepted
  kResidual = 3,  // the token that replaces a rejected one
};

using PhiloxBlock = std::array<uint32_t, 4>;

inline PhiloxBlock philox4x32(PhiloxBlock counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

inline PhiloxBlock random_words(uint64_t seed, uint32_t sequence, uint32_t position, Draw draw) {
  return philox4x32({sequence, position, static_cast<uint32_t>(draw), 0},
                    {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

inline NoiseKey noise_key(uint64_t seed, uint32_t sequence, uint32_t position) {
  const PhiloxBlock r = random_words(seed, sequence, position, Draw::kToken);
  return {{r[0], r[1]}};
}

// Uniform in [0, 1), a multiple of 2⁻⁵³.
inline double uniform(uint64_t seed, uint32_t sequence, uint32_t position, Draw draw) {
  const PhiloxBlock r = random_words(seed, sequence, position, draw);
  return (static_cast<double>(r[0] >> 5) * 67108864.0 + static_cast<double>(r[1] >> 6)) * (1.0 / 9007199254740992.0);
}

}  // namespace edgec

#endif  // EDGEC_PHILOX_H_
