#include "sampling_params.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "status.h"
#include "unicode.h"

namespace edgec {
namespace {

[[noreturn]] void refuse(const std::string& line) { throw Error(EDGEC_INVALID_ARGUMENT, line); }

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

// `good` is false for NaN, whatever the comparison was.
void want(bool good, const char* field, double value, const char* range) {
  if (!good) refuse(std::string(field) + " is " + number(value) + "; it must be " + range);
}

void want_token(int32_t token, int32_t vocab, const char* field) {
  if (token < 0 || token >= vocab) {
    refuse(std::string(field) + " names the token " + std::to_string(token) + ", but the vocabulary ends at " +
           std::to_string(vocab - 1));
  }
}

// The array's end; refuses a count without an array.
template <typename T>
const T* end_of(const T* array, int32_t count, const char* field) {
  if (count < 0) refuse(std::string(field) + " has a negative count");
  if (count > 0 && array == nullptr) refuse(std::string(field) + " is null, with a count");
  return count == 0 ? array : array + count;
}

}  // namespace

SamplingParams sampling_params(const edgec_sampling& options, int32_t vocab) {
  if (options.struct_size != sizeof(edgec_sampling)) {
    throw Error(EDGEC_VERSION_MISMATCH, "edgec_sampling has another size than this library's: use EDGEC_SAMPLING_INIT");
  }
  SamplingParams params;
  params.max_tokens = options.max_tokens;
  params.temperature = options.temperature;
  params.top_k = options.top_k;
  params.top_p = options.top_p;
  params.min_p = options.min_p;
  params.repetition_penalty = options.repetition_penalty;
  params.frequency_penalty = options.frequency_penalty;
  params.presence_penalty = options.presence_penalty;
  params.seed = options.seed;
  params.has_seed = options.has_seed != 0;
  params.logprobs = options.logprobs;
  params.ignore_eos = options.ignore_eos != 0;
  params.n = options.n;
  params.speculate = options.speculate;
  const edgec_logit_bias* bias_end = end_of(options.logit_bias, options.logit_bias_count, "logit_bias");
  for (const edgec_logit_bias* bias = options.logit_bias; bias != bias_end; ++bias) {
    params.logit_bias.push_back({bias->token, bias->bias});
  }
  const char* const* stop_end = end_of(options.stop, options.stop_count, "stop");
  if (options.stop_count > kMaxStopStrings) {
    refuse("stop has " + std::to_string(options.stop_count) + " strings; at most " + std::to_string(kMaxStopStrings));
  }
  for (const char* const* stop = options.stop; stop != stop_end; ++stop) {
    if (*stop == nullptr) refuse("stop has a null string");
    params.stop.emplace_back(*stop);
  }
  const int32_t* token_end = end_of(options.stop_tokens, options.stop_token_count, "stop_tokens");
  params.stop_tokens.assign(options.stop_tokens, token_end);
  validate(params, vocab);
  return params;
}

void validate(const SamplingParams& p, int32_t vocab) {
  want(p.max_tokens >= 0, "max_tokens", p.max_tokens, "0 or more");
  want(p.temperature >= 0 && p.temperature <= 100, "temperature", p.temperature, "between 0 and 100");
  want(p.top_k >= 0, "top_k", p.top_k, "0 (off) or more");
  want(p.top_p > 0 && p.top_p <= 1, "top_p", p.top_p, "above 0 and at most 1");
  want(p.min_p >= 0 && p.min_p < 1, "min_p", p.min_p, "at least 0 and below 1");
  want(p.repetition_penalty > 0 && p.repetition_penalty <= 100, "repetition_penalty", p.repetition_penalty,
       "above 0 and at most 100");
  want(p.frequency_penalty >= -2 && p.frequency_penalty <= 2, "frequency_penalty", p.frequency_penalty,
       "between -2 and 2");
  want(p.presence_penalty >= -2 && p.presence_penalty <= 2, "presence_penalty", p.presence_penalty, "between -2 and 2");
  want(p.logprobs >= -1 && p.logprobs <= kMaxTopLogprobs, "logprobs", p.logprobs, "between 0 and 20, or -1 for none");
  want(p.n >= 1 && p.n <= kMaxSequences, "n", p.n, "between 1 and 64");
  want(p.speculate >= EDGEC_SPECULATE_DEFAULT && p.speculate <= EDGEC_SPECULATE_NEVER, "speculate", p.speculate,
       "EDGEC_SPECULATE_*");
  if (p.n > 1 && p.greedy()) refuse("n is " + std::to_string(p.n) + " at temperature 0: all answers would be the same");

  std::vector<int32_t> biased;
  for (const LogitBias& bias : p.logit_bias) {
    want_token(bias.token, vocab, "logit_bias");
    want(bias.bias >= -kMaxLogitBias && bias.bias <= kMaxLogitBias, "logit_bias", bias.bias, "between -100 and 100");
    biased.push_back(bias.token);
  }
  std::sort(biased.begin(), biased.end());
  if (std::adjacent_find(biased.begin(), biased.end()) != biased.end()) refuse("logit_bias names a token twice");

  if (p.stop.size() > static_cast<size_t>(kMaxStopStrings)) {
    refuse("stop has " + std::to_string(p.stop.size()) + " strings; at most " + std::to_string(kMaxStopStrings));
  }
  for (const std::string& stop : p.stop) {
    if (stop.empty()) refuse("stop has an empty string");
    if (stop.size() > static_cast<size_t>(kMaxStopBytes)) refuse("stop has a string of more than 256 bytes");
    if (find_invalid_utf8(stop) != std::string_view::npos) refuse("stop has a string that is not UTF-8");
  }
  for (const int32_t token : p.stop_tokens) want_token(token, vocab, "stop_tokens");
}

}  // namespace edgec
