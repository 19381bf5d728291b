#include "sampler.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>

#include "vector_math.h"

namespace edgec {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kRacers = 8;         // among whom a drafter's probabilities are shared out
constexpr double kLeastLikely = 1e-4;  // rarer tokens are worth no row of a pass
// A head answers with the mean over what the model may be thinking, which is flatter than any one of it. In a race the
// noise is known, and what counts is to name the winner: that takes a sharper guess than the mean.
constexpr float kSharper = 1.15f;

// Floats as unsigned integers of the same order; −0 counts as 0.
uint32_t key_of(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

size_t blocks_of(int32_t vocab) { return static_cast<size_t>(row_blocks(vocab)); }

// The first token with the greatest logit.
int32_t best_of(const float* logits, const RowExtent& extent) {
  int32_t token = extent.block * kRowBlock;
  while (logits[token] != extent.greatest) ++token;
  return token;
}

// What turns a logit into a log-probability: (z − shift) − log_sum.
struct Normaliser {
  float shift = kNotANumber;
  float log_sum = 0;

  float operator()(float logit) const { return (logit - shift) - log_sum; }
};

// Of bad logits: one that gives NaN.
Normaliser normaliser_of(const float* logits, int32_t vocab) {
  const RowExtent extent = row_loops().extent(logits, vocab, nullptr);
  if (!extent.finite) return {};
  const double sum = row_loops().exponential_sum(logits, vocab, extent.greatest);
  return {extent.greatest, log_f32(static_cast<float>(sum))};
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

// The first token at which the running sum of weights is above `target`; the last one with a weight when rounding
// leaves none. Whole blocks are stepped over by their sums.
int32_t draw_from(const float* weights, int32_t vocab, const double* sums, double target) {
  double before = 0;
  int32_t start = 0;
  for (int32_t block = 0; start + kRowBlock < vocab && before + sums[block] <= target; ++block) {
    before += sums[block];
    start += kRowBlock;
  }
  const int32_t end = std::min(vocab, start + kRowBlock);
  int32_t last = -1;
  for (int32_t i = start; i < end; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    last = i;
    before += static_cast<double>(weights[i]);
    if (before > target) return i;
  }
  while (last < 0 && start > 0) {
    --start;
    last = weights[start] > 0.0f ? start : -1;
  }
  return last;
}

Sampled bad_logits() {
  Sampled none;
  none.outcome = SampleOutcome::kBadLogits;
  none.logprob = kNotANumber;
  return none;
}

// Of a request's options those that bring a drafter's distribution near the model's; where greedy, its own
// distribution.
SamplingParams of_a_drafter(const SamplingParams& params) {
  SamplingParams own;
  own.temperature = 1.0f;
  if (params.greedy()) return own;
  own.temperature = params.temperature;
  own.top_k = params.top_k;
  own.top_p = params.top_p;
  own.min_p = params.min_p;
  return own;
}

bool truncates(const SamplingParams& params, int32_t vocab) {
  return params.top_p < 1.0f || (params.top_k > 0 && params.top_k < vocab);
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

bool Sampler::report(const float* logits, int32_t vocab, const SamplingParams& params, Sampled* result) {
  result->logprob = kNotANumber;
  if (params.logprobs < 0) return true;
  const Normaliser normaliser = normaliser_of(logits, vocab);
  if (!(normaliser.shift == normaliser.shift)) return false;
  shift_ = normaliser.shift;
  log_sum_ = normaliser.log_sum;
  result->top = greatest(logits, vocab, params.logprobs);
  for (edgec_token_logprob& top : result->top) top.logprob = normaliser(top.logprob);
  raw_.assign(logits, logits + vocab);
  return true;
}

float Sampler::reported(const SamplingParams& params, int32_t token) const {
  return params.logprobs < 0 ? kNotANumber : Normaliser{shift_, log_sum_}(raw_[static_cast<size_t>(token)]);
}

Sampled Sampler::sample(float* logits, int32_t vocab, const SamplingParams& params, const History* history,
                        uint64_t seed, uint32_t sequence, uint32_t position) {
  Sampled result;
  if (!report(logits, vocab, params, &result)) return bad_logits();
  if (params.greedy()) {
    adjust(logits, params, history);
    const RowExtent extent = row_loops().extent(logits, vocab, nullptr);
    if (!extent.finite) return bad_logits();
    result.token = best_of(logits, extent);
  } else {
    Racer first;
    if (race(logits, vocab, params, history, nullptr, noise_key(seed, sequence, position), 1, &first) == 0)
      return bad_logits();
    result.token = first.at;
  }
  result.logprob = reported(params, result.token);
  return result;
}

Sampled Sampler::verify(float* logits, int32_t vocab, const SamplingParams& params, const History* history,
                        uint64_t seed, uint32_t sequence, uint32_t position, const Proposal& proposal,
                        const std::vector<int32_t>& vocabulary, bool* kept) {
  if (params.greedy() || proposal.weights.empty()) {
    const Sampled result = sample(logits, vocab, params, history, seed, sequence, position);
    *kept = result.token == proposal.token;
    return result;
  }
  *kept = false;
  Sampled result;
  if (!report(logits, vocab, params, &result)) return bad_logits();
  const Processed p = process(logits, vocab, params, history);
  if (p.outcome != SampleOutcome::kSampled) return bad_logits();
  const double likely = static_cast<double>(logits[proposal.token]) / p.total;
  const double proposed = static_cast<double>(proposal.weight) / proposal.total;
  *kept = uniform(seed, sequence, position, Draw::kAccept) * proposed < likely;
  result.token = proposal.token;
  if (!*kept) {
    const float scale = static_cast<float>(1.0 / p.total), draft_scale = static_cast<float>(1.0 / proposal.total);
    for (int32_t i = 0; i < vocab; ++i) logits[i] *= scale;
    for (size_t i = 0; i < proposal.weights.size(); ++i) {
      const float left = logits[vocabulary[i]] - proposal.weights[i] * draft_scale;
      logits[vocabulary[i]] = left > 0.0f ? left : 0.0f;
    }
    const double total = row_loops().sum(logits, vocab, sums_.data());
    // Nothing is left where p = q but for rounding, and there every proposal is kept.
    *kept = !(total > 0.0);
    if (!*kept)
      result.token = draw_from(logits, vocab, sums_.data(), uniform(seed, sequence, position, Draw::kResidual) * total);
  }
  result.logprob = reported(params, result.token);
  return result;
}

void Sampler::propose(float* logits, int32_t vocab, const SamplingParams& params, uint64_t seed, uint32_t sequence,
                      uint32_t position, Proposal* proposal) {
  proposal->token = -1;
  proposal->weight = 1;
  proposal->total = 1;
  proposal->weights.clear();
  const RowExtent extent = row_loops().extent(logits, vocab, nullptr);
  if (!extent.finite) return;
  if (params.greedy()) {
    proposal->token = best_of(logits, extent);
    return;
  }
  proposal->total = process(logits, vocab, of_a_drafter(params), nullptr).total;
  proposal->token =
      draw_from(logits, vocab, sums_.data(), uniform(seed, sequence, position, Draw::kDraft) * proposal->total);
  proposal->weight = logits[proposal->token];
  proposal->weights.assign(logits, logits + vocab);
}

void Sampler::candidates(float* logits, int32_t vocab, const SamplingParams& params,
                         const std::vector<int32_t>& vocabulary, uint64_t seed, uint32_t sequence, uint32_t position,
                         int count, std::vector<Candidate>* out) {
  out->clear();
  if (!params.greedy()) {
    SamplingParams own = of_a_drafter(params);
    own.temperature /= kSharper;
    Racer first[kRacers];
    const int32_t found =
        race(logits, vocab, own, nullptr, vocabulary.data(), noise_key(seed, sequence, position), kRacers, first);
    double all = 0;
    for (int32_t i = 0; i < found; ++i) all += 1.0 / first[i].time;
    for (int32_t i = 0; i < std::min(found, count); ++i)
      out->push_back({first[i].at, static_cast<float>(1.0 / first[i].time / all)});
    return;
  }
  const Processed q = process(logits, vocab, of_a_drafter(params), nullptr);
  if (q.outcome != SampleOutcome::kSampled) return;
  const auto before = [](const Candidate& a, const Candidate& b) { return a.probability > b.probability; };
  const double least = kLeastLikely * q.total;
  const float scale = static_cast<float>(1.0 / q.total);
  for (size_t block = 0; block < sums_.size(); ++block) {
    if (sums_[block] < least) continue;
    const int32_t start = static_cast<int32_t>(block) * kRowBlock, end = std::min(vocab, start + kRowBlock);
    for (int32_t i = start; i < end; ++i) {
      if (logits[i] < least) continue;
      const Candidate found = {i, logits[i] * scale};
      if (static_cast<int>(out->size()) == count) {
        if (!before(found, out->back())) continue;
        out->pop_back();
      }
      out->insert(std::upper_bound(out->begin(), out->end(), found, before), found);
    }
  }
}

// Step 9 with those before it: the `places` first tokens by rising time. Returns how many there are, 0 for bad logits.
int32_t Sampler::race(float* logits, int32_t vocab, const SamplingParams& params, const History* history,
                      const int32_t* tokens, NoiseKey key, int32_t places, Racer* first) {
  RaceRow row = {logits, vocab, params.temperature, {}, nullptr, tokens};
  if (truncates(params, vocab) || params.min_p > 0.0f) {
    if (process(logits, vocab, params, history).outcome != SampleOutcome::kSampled) return 0;
    row.temperature = 0.0f;  // weights from here on
  } else {
    adjust(logits, params, history);
  }
  maxima_.resize(blocks_of(vocab));
  row.extent = row_loops().extent(logits, vocab, maxima_.data());
  row.maxima = maxima_.data();
  return row.extent.finite ? row_loops().race(row, key, places, first) : 0;
}

// Leaves the weights' block sums in sums_, unless greedy.
Processed Sampler::process(float* logits, int32_t vocab, const SamplingParams& params, const History* history) {
  Processed result;
  adjust(logits, params, history);
  maxima_.resize(blocks_of(vocab));
  sums_.resize(blocks_of(vocab));
  const RowExtent extent = row_loops().extent(logits, vocab, maxima_.data());
  if (!extent.finite) {
    result.outcome = SampleOutcome::kBadLogits;
    return result;
  }
  result.best = best_of(logits, extent);
  if (params.greedy()) {
    std::fill(logits, logits + vocab, 0.0f);
    logits[result.best] = 1.0f;
    result.total = 1.0;
    return result;
  }
  if (truncates(params, vocab)) {
    truncate(logits, vocab, params, extent.greatest);
    result.total = row_loops().sum(logits, vocab, sums_.data());
    return result;
  }
  result.total = row_loops().exponentials(logits, vocab, extent.greatest, params.temperature, logits, sums_.data());
  if (params.min_p > 0.0f) {
    for (int32_t i = 0; i < vocab; ++i) logits[i] = logits[i] >= params.min_p ? logits[i] : 0.0f;
    result.total = row_loops().sum(logits, vocab, sums_.data());
  }
  return result;
}

// Steps 5 to 8 where top-k or top-p removes tokens. Few can be kept, so few are looked at; maxima_ tells where they
// are.
void Sampler::truncate(float* logits, int32_t vocab, const SamplingParams& params, float greatest) {
  const bool by_count = params.top_k > 0 && params.top_k < vocab;
  const auto k = static_cast<size_t>(params.top_k);
  const bool few = by_count && k <= maxima_.size();
  double mass = 0;
  if (few) {
    // At least k tokens are as great as the k-th greatest of the blocks' maxima.
    ordered_ = maxima_;
    const auto at = ordered_.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(ordered_.begin(), at, ordered_.end(), std::greater<float>());
    collect(logits, nullptr, vocab, *at);
  } else {
    weights_.resize(static_cast<size_t>(vocab));
    const double total =
        row_loops().exponentials(logits, vocab, greatest, params.temperature, weights_.data(), sums_.data());
    mass = static_cast<double>(params.top_p) * total;
    // Tokens that weigh less than `least` have, all together, half of what top-p may leave out; and logarithms err by
    // far less than the 1 that is taken off.
    const double least = 0.5 * (total - mass) / vocab;
    const float depth = log_f32(static_cast<float>(least)) - 1.0f;
    if (by_count) {
      collect(logits, nullptr, vocab, -kInfinity);
    } else {
      collect(logits, weights_.data(), vocab, greatest + params.temperature * depth);
    }
  }
  if (by_count) {
    cut(params.top_k);
    for (Keepable& c : candidates_) {
      const float z = logits[c.token];
      c.mass = few ? exp_f32((z - greatest) / params.temperature) : weights_[static_cast<size_t>(c.token)];
    }
    drop([](const Keepable& c) { return !(c.mass > 0.0f); });
  }
  if (params.top_p < 1.0f) {
    if (by_count) {  // of what top-k keeps
      scatter(logits, vocab);
      mass = static_cast<double>(params.top_p) * row_loops().sum(logits, vocab, sums_.data());
    }
    cut(mass);
  }
  if (params.min_p > 0.0f) drop([&](const Keepable& c) { return !(c.mass >= params.min_p); });
  scatter(logits, vocab);
}

// Keepables: the tokens with logits of at least `least`. Their masses are their weights, which are not 0 then; or 1
// each without weights.
void Sampler::collect(const float* logits, const float* weights, int32_t vocab, float least) {
  candidates_.clear();
  for (size_t block = 0; block < maxima_.size(); ++block) {
    if (maxima_[block] < least) continue;
    const int32_t start = static_cast<int32_t>(block) * kRowBlock, end = std::min(vocab, start + kRowBlock);
    for (int32_t i = start; i < end; ++i) {
      const float mass = weights == nullptr ? 1.0f : weights[i];
      if (logits[i] >= least && mass > 0.0f) candidates_.push_back({key_of(logits[i]), mass, i});
    }
  }
}

template <typename Unwanted>
void Sampler::drop(Unwanted unwanted) {
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), unwanted), candidates_.end());
}

// Keep the first candidates, in descending order of keys and ascending order of tokens, that together have the mass
// `wanted`. Radix descent instead of sorting: masses of all that share the keys' leading bits, from the top until
// `wanted` is reached in one of these buckets; then the same inside it.
void Sampler::cut(double wanted) {
  constexpr int kShifts[] = {21, 10, 0};
  constexpr int kBits[] = {11, 11, 10};
  double above = 0;
  uint32_t prefix = 0;
  const std::vector<Keepable>* left = &candidates_;
  for (int level = 0; level < 3; ++level) {
    const int shift = kShifts[level];
    const uint32_t buckets = uint32_t{1} << kBits[level];
    mass_.assign(buckets, 0.0);
    for (const Keepable& c : *left) mass_[c.key >> shift & (buckets - 1)] += static_cast<double>(c.mass);
    uint32_t found = buckets;  // the lowest that isn't empty, if rounding keeps `wanted` out of reach
    for (uint32_t bucket = buckets; bucket-- > 0;) {
      if (mass_[bucket] == 0.0) continue;
      if (found < buckets) above += mass_[found];
      found = bucket;
      if (above + mass_[bucket] >= wanted) break;
    }
    prefix = prefix << kBits[level] | found;
    const auto inside = [&](const Keepable& c) { return c.key >> shift == prefix; };
    if (level == 0) {
      narrowed_.clear();
      std::copy_if(candidates_.begin(), candidates_.end(), std::back_inserter(narrowed_), inside);
      left = &narrowed_;
    } else {
      narrowed_.erase(std::remove_if(narrowed_.begin(), narrowed_.end(), std::not_fn(inside)), narrowed_.end());
    }
  }
  // What is left has one key, and so one mass: the first token of it is kept, and as many more as it takes.
  int32_t last = -1;
  for (const Keepable& c : narrowed_) {
    if (last >= 0 && above >= wanted) break;
    above += static_cast<double>(c.mass);
    last = c.token;
  }
  drop([&](const Keepable& c) { return c.key < prefix || (c.key == prefix && c.token > last); });
}

// The row becomes the candidates' masses, and 0 elsewhere.
void Sampler::scatter(float* logits, int32_t vocab) const {
  std::fill(logits, logits + vocab, 0.0f);
  for (const Keepable& c : candidates_) logits[c.token] = c.mass;
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

double Sampler::weight_sum(const float* weights, int32_t vocab) { return row_loops().sum(weights, vocab, nullptr); }

int32_t Sampler::draw(const float* weights, int32_t vocab, double total, double u) {
  std::vector<double> sums(blocks_of(vocab));
  row_loops().sum(weights, vocab, sums.data());
  return draw_from(weights, vocab, sums.data(), u * total);
}

float Sampler::logprob(const float* logits, int32_t vocab, int32_t token) {
  return normaliser_of(logits, vocab)(logits[token]);
}

}  // namespace edgec
