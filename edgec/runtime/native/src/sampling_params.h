// How one request wants its tokens chosen: edgec_sampling of edgec.h, copied and checked.
#ifndef EDGEC_SAMPLING_PARAMS_H_
#define EDGEC_SAMPLING_PARAMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "edgec.h"

namespace edgec {

struct LogitBias {
  int32_t token;
  float bias;
};

// The defaults are those of EDGEC_SAMPLING_INIT.
struct SamplingParams {
  int32_t max_tokens = 0;  // 0: until the context is full
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  uint64_t seed = 0;
  bool has_seed = false;
  int32_t logprobs = -1;
  bool ignore_eos = false;
  int32_t n = 1;
  int32_t speculate = EDGEC_SPECULATE_DEFAULT;
  std::vector<LogitBias> logit_bias;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_tokens;

  bool greedy() const { return temperature == 0.0f; }
  bool has_penalties() const {
    return repetition_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f;
  }
};

constexpr int32_t kMaxTopLogprobs = 20;
constexpr int32_t kMaxSequences = 64;
constexpr int32_t kMaxStopStrings = 16;
constexpr int32_t kMaxStopBytes = 256;
constexpr float kMaxLogitBias = 100.0f;  // as in OpenAI's API

// Copy from the ABI's struct. Throws Error(EDGEC_INVALID_ARGUMENT) for a null array, a count out of range, or what
// `validate` refuses; Error(EDGEC_VERSION_MISMATCH) for a struct_size that isn't this header's.
SamplingParams sampling_params(const edgec_sampling& options, int32_t vocab);

// Throws Error(EDGEC_INVALID_ARGUMENT) naming the field: numbers out of range or not finite, tokens outside the
// vocabulary, a token biased twice, stop strings that are empty or not UTF-8, and n > 1 at temperature 0 (n equal
// answers).
void validate(const SamplingParams& params, int32_t vocab);

}  // namespace edgec

#endif  // EDGEC_SAMPLING_PARAMS_H_
