#include "sampler.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>

#include "math.h"

namespace edgec {
namespace {

typedef double Double8 __attribute__((vector_size(64)));

constexpr int32_t kBlock = 256;  // tokens whose weights are added by lanes; blocks are added in order

// Floats as unsigned integers of the same order; −0 counts as 0.
uint32_t key_of(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

double add_lanes(Double8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

EDGEC_INLINE Double8 to_double(Vec8 v) { return __builtin_convertvector(v, Double8); }

double block_sum(const float* weights, int32_t count) {
  Double8 sum = {};
  int32_t i = 0;
  for (; i + 8 <= count; i += 8) sum += to_double(load8(weights + i));
  if (i < count) sum += to_double(load_part8(weights + i, static_cast<size_t>(count - i), 0.0f));
  return add_lanes(sum);
}

struct Extent {
  float greatest;
  bool finite;  // all of them
};

Extent extent(const float* x, int32_t count) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  Vec8 greatest = splat8(kLowest);
  Int8x32 bad = {};
  int32_t i = 0;
  const auto look = [&](Vec8 v) {
    greatest = v > greatest ? v : greatest;
    bad |= (v - v) != splat8(0.0f);  // NaN and infinities give NaN
  };
  for (; i + 8 <= count; i += 8) look(load8(x + i));
  if (i < count) look(load_part8(x + i, static_cast<size_t>(count - i), x[0]));
  int32_t any = 0;
  for (int lane = 0; lane < 8; ++lane) any |= bad[lane];
  return {max_lanes(greatest), any == 0};
}

int32_t first_equal(const float* x, int32_t count, float wanted) {
  for (int32_t i = 0; i < count; ++i) {
    if (x[i] == wanted) return i;
  }
  return -1;
}

// weights[i] = e^((x[i] − greatest) / temperature); may be in place.
void exponentials(const float* x, int32_t count, float greatest, float temperature, float* weights) {
  const Vec8 shift = splat8(greatest), divisor = splat8(temperature);
  int32_t i = 0;
  for (; i + 8 <= count; i += 8) store8(weights + i, exp8((load8(x + i) - shift) / divisor));
  for (; i < count; ++i) weights[i] = exp_f32((x[i] - greatest) / temperature);
}

// log Σ e^(x − greatest).
float log_sum(const float* x, int32_t count, float greatest) {
  const Vec8 shift = splat8(greatest);
  Double8 sum = {};
  int32_t i = 0;
  for (; i + 8 <= count; i += 8) sum += to_double(exp8(load8(x + i) - shift));
  if (i < count) {
    const Vec8 rest = load_part8(x + i, static_cast<size_t>(count - i), -std::numeric_limits<float>::infinity());
    sum += to_double(exp8(rest - shift));
  }
  return log_f32(static_cast<float>(add_lanes(sum)));
}

// The `count` greatest, descending; of equal ones the lowest ids.
std::vector<edgec_token_logprob> greatest(const float* x, int32_t vocab, int32_t count) {
  std::vector<edgec_token_logprob> top;
  const auto wanted = static_cast<size_t>(std::min(count, vocab));
  if (wanted == 0) return top;
  top.reserve(wanted + 1);
  for (int32_t i = 0; i < vocab; ++i) {
    if (top.size() == wanted && !(x[i] > top.back().logprob)) continue;
    if (top.size() == wanted) top.pop_back();
    auto at = top.end();
    while (at != top.begin() && (at - 1)->logprob < x[i]) --at;
    top.insert(at, {i, x[i]});
  }
  return top;
}

void adjust(float* logits, const SamplingParams& params, const History* history) {
  for (const LogitBias& bias : params.logit_bias) logits[bias.token] += bias.bias;
  if (!params.has_penalties() || history == nullptr) return;
  for (const History::Entry& entry : history->entries()) {
    float z = logits[entry.token];
    if (params.repetition_penalty != 1.0f) {
      z = z > 0 ? z / params.repetition_penalty : z * params.repetition_penalty;
    }
    if (entry.answer > 0) {
      z -= params.frequency_penalty * static_cast<float>(entry.answer);
      z -= params.presence_penalty;
    }
    logits[entry.token] = z;
  }
}

}  // namespace

History::Entry& History::entry(int32_t token) {
  const auto [at, added] = index_.try_emplace(token, static_cast<uint32_t>(entries_.size()));
  if (added) entries_.push_back({token, 0, 0});
  return entries_[at->second];
}

void History::add_prompt(const int32_t* tokens, int32_t count) {
  for (int32_t i = 0; i < count; ++i) entry(tokens[i]).prompt += 1;
}

void History::add_answer(int32_t token) { entry(token).answer += 1; }

// An entry without counts may not stay: the repetition penalty looks at which tokens there are.
void History::remove_answer(int32_t token) {
  Entry& own = entry(token);
  assert(own.answer > 0);
  own.answer -= 1;
  if (own.answer > 0 || own.prompt > 0) return;
  const uint32_t at = index_.at(token);
  const Entry last = entries_.back();
  entries_[at] = last;
  index_[last.token] = at;
  entries_.pop_back();
  index_.erase(token);
}

Sampled Sampler::sample(float* logits, int32_t vocab, const SamplingParams& params, const History* history,
                        uint64_t seed, uint32_t sequence, uint32_t position) {
  Sampled result;
  result.logprob = std::numeric_limits<float>::quiet_NaN();
  float own = 0;  // greatest logit + log Σ: what turns a logit into a log-probability
  float shift = 0;
  if (params.logprobs >= 0) {
    const Extent raw = extent(logits, vocab);
    if (!raw.finite) {
      result.outcome = SampleOutcome::kBadLogits;
      return result;
    }
    shift = raw.greatest;
    own = log_sum(logits, vocab, shift);
    result.top = greatest(logits, vocab, params.logprobs);
    for (edgec_token_logprob& top : result.top) top.logprob = (top.logprob - shift) - own;
    raw_.assign(logits, logits + vocab);
  }
  if (params.greedy()) {
    adjust(logits, params, history);
    const Extent all = extent(logits, vocab);
    if (!all.finite) {
      result.outcome = SampleOutcome::kBadLogits;
      return result;
    }
    result.token = first_equal(logits, vocab, all.greatest);
  } else {
    const Processed processed = process(logits, vocab, params, history);
    result.outcome = processed.outcome;
    if (processed.outcome != SampleOutcome::kSampled) return result;
    result.token = draw(logits, vocab, processed.total, uniform(seed, sequence, position, Draw::kToken));
  }
  if (params.logprobs >= 0) result.logprob = (raw_[static_cast<size_t>(result.token)] - shift) - own;
  return result;
}

Processed Sampler::process(float* logits, int32_t vocab, const SamplingParams& params, const History* history) {
  Processed result;
  adjust(logits, params, history);
  const Extent all = extent(logits, vocab);
  if (!all.finite) {
    result.outcome = SampleOutcome::kBadLogits;
    return result;
  }
  result.best = first_equal(logits, vocab, all.greatest);
  if (params.greedy()) {
    std::fill(logits, logits + vocab, 0.0f);
    logits[result.best] = 1.0f;
    result.total = 1.0;
    return result;
  }
  const bool by_rank = params.top_p < 1.0f || (params.top_k > 0 && params.top_k < vocab);
  float* weights = logits;
  if (by_rank) {
    weights_.resize(static_cast<size_t>(vocab));
    weights = weights_.data();
  }
  exponentials(logits, vocab, all.greatest, params.temperature, weights);
  if (params.top_k > 0 && params.top_k < vocab) {
    keep(logits, weights, vocab, cut(logits, nullptr, vocab, params.top_k));
  }
  if (params.top_p < 1.0f) {
    const double mass = static_cast<double>(params.top_p) * weight_sum(weights, vocab);
    keep(logits, weights, vocab, cut(logits, weights, vocab, mass));
  }
  if (params.min_p > 0.0f) {
    for (int32_t i = 0; i < vocab; ++i) weights[i] = weights[i] >= params.min_p ? weights[i] : 0.0f;
  }
  if (by_rank) std::memcpy(logits, weights, static_cast<size_t>(vocab) * sizeof(float));
  result.total = weight_sum(logits, vocab);
  return result;
}

// Radix descent: histograms of what there is over the keys' leading bits, from the top until `wanted` is reached in a
// bucket; then the same inside that bucket. No sorting, and at most three passes.
Sampler::Cut Sampler::cut(const float* logits, const float* weights, int32_t vocab, double wanted) {
  constexpr int kShifts[] = {21, 10, 0};
  constexpr int kBits[] = {11, 11, 10};
  candidates_.clear();
  for (int32_t i = 0; i < vocab; ++i) {
    if (weights == nullptr || weights[i] > 0.0f)
      candidates_.push_back({key_of(logits[i]), weights ? weights[i] : 1.0f});
  }
  double above = 0;
  uint32_t prefix = 0;
  for (int level = 0; level < 3; ++level) {
    const uint32_t buckets = uint32_t{1} << kBits[level], mask = buckets - 1;
    mass_.assign(buckets, 0.0);
    for (const Candidate& c : candidates_) mass_[c.key >> kShifts[level] & mask] += static_cast<double>(c.mass);
    uint32_t bucket = buckets, last = buckets;
    while (bucket-- > 0) {
      if (mass_[bucket] == 0.0) continue;
      last = bucket;
      if (above + mass_[bucket] >= wanted) break;
      above += mass_[bucket];
    }
    if (bucket == ~uint32_t{0}) {  // never reached, by rounding: the lowest that there is
      bucket = last;
      above -= mass_[bucket];
    }
    prefix = prefix << kBits[level] | bucket;
    const int shift = kShifts[level];
    const auto outside = [&](const Candidate& c) { return c.key >> shift != prefix; };
    candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), outside), candidates_.end());
  }
  // What is left has one key, and so one mass.
  int32_t ties = 0;
  while (ties < static_cast<int32_t>(candidates_.size()) && above < wanted) {
    above += static_cast<double>(candidates_[static_cast<size_t>(ties)].mass);
    ++ties;
  }
  return {prefix, std::max(ties, 1)};
}

void Sampler::keep(const float* logits, float* weights, int32_t vocab, Cut cut) {
  int32_t ties = cut.ties;
  for (int32_t i = 0; i < vocab; ++i) {
    const uint32_t key = key_of(logits[i]);
    if (key > cut.key) continue;
    if (key == cut.key && weights[i] > 0.0f && ties > 0) {
      --ties;
      continue;
    }
    weights[i] = 0.0f;
  }
}

std::vector<TokenProbability> Sampler::probabilities(float* logits, int32_t vocab, const SamplingParams& params,
                                                     const History* history) {
  std::vector<TokenProbability> result;
  const Processed processed = process(logits, vocab, params, history);
  if (processed.outcome != SampleOutcome::kSampled) return result;
  for (int32_t i = 0; i < vocab; ++i) {
    if (logits[i] > 0.0f) result.push_back({i, static_cast<double>(logits[i]) / processed.total});
  }
  return result;
}

double Sampler::weight_sum(const float* weights, int32_t vocab) {
  double sum = 0;
  for (int32_t i = 0; i < vocab; i += kBlock) sum += block_sum(weights + i, std::min(kBlock, vocab - i));
  return sum;
}

int32_t Sampler::draw(const float* weights, int32_t vocab, double total, double u) {
  const double target = u * total;
  double sum = 0;
  int32_t last = -1;  // for when rounding leaves nothing above the target
  for (int32_t i = 0; i < vocab; i += kBlock) {
    const int32_t count = std::min(kBlock, vocab - i);
    const double block = block_sum(weights + i, count);
    const bool here = sum + block > target;
    if (here || i + kBlock >= vocab) {
      double within = sum;
      for (int32_t j = i; j < i + count; ++j) {
        if (!(weights[j] > 0.0f)) continue;
        last = j;
        within += static_cast<double>(weights[j]);
        if (here && within > target) return j;
      }
      if (here) return last;
    }
    sum += block;
  }
  for (int32_t i = vocab - 1; last < 0 && i >= 0; --i) last = weights[i] > 0.0f ? i : -1;
  return last;
}

float Sampler::logprob(const float* logits, int32_t vocab, int32_t token) {
  const Extent all = extent(logits, vocab);
  if (!all.finite) return std::numeric_limits<float>::quiet_NaN();
  return (logits[token] - all.greatest) - log_sum(logits, vocab, all.greatest);
}

}  // namespace edgec
