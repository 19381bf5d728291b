// From a row of logits to a token.
//
// In this order (z is the logit, float32 throughout; m and the sums see every token):
//   1. logprob(t) = z[t] − m − log Σ exp(z − m), of the model's own distribution, when logprobs are asked for
//   2. logit bias:          z[t] += bias
//   3. repetition penalty:  z[t] = z[t] > 0 ? z[t] / r : z[t] · r, for tokens of prompt and answer (Keskar et al.,
//   2019)
//   4. frequency, presence: z[t] −= frequency · count[t], then z[t] −= presence, for tokens of the answer
//   5. temperature 0: the greatest z, of equal ones the lowest token id. Otherwise
//      w[t] = exp((z[t] − m) / temperature) by exp8 of vector_math.h, which is 0 for arguments below −87.33654
//   6. top-k: the k greatest z; of equal ones the lowest ids
//   7. top-p: in descending z (equal: ascending id), tokens before which less than top_p · Σ w has been seen
//   8. min-p: tokens with w ≥ min_p · w_max = min_p
//   9. the draw: of the kept tokens the one with the least E / w, E being its noise at this position (noise.h), the
//      quotient in double; of equal ones the lowest id
// Every sum has a fixed order that no vector width changes, so the token is the same on every machine.
#ifndef EDGEC_SAMPLER_H_
#define EDGEC_SAMPLER_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "edgec.h"
#include "philox.h"
#include "row_loops.h"
#include "sampling_params.h"

namespace edgec {

// Which tokens a sequence has had: what the penalties look at. Sparse; forking a sequence copies it.
class History {
 public:
  struct Entry {
    int32_t token;
    int32_t prompt;  // times in the prompt
    int32_t answer;  // times in the answer
  };

  void add_prompt(const int32_t* tokens, int32_t count);
  void add_answer(int32_t token);
  void remove_answer(int32_t token);  // a rolled-back draft's; must have been added
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  Entry& entry(int32_t token);

  std::vector<Entry> entries_;
  std::unordered_map<int32_t, uint32_t> index_;
};

enum class SampleOutcome { kSampled, kBadLogits /* NaN or infinite: the model or its input is broken */ };

struct Sampled {
  SampleOutcome outcome = SampleOutcome::kSampled;
  int32_t token = -1;
  float logprob = 0;                     // of the model's own distribution; NaN unless params.logprobs ≥ 0
  std::vector<edgec_token_logprob> top;  // params.logprobs most likely tokens, descending; equal ones by id
};

struct TokenProbability {
  int32_t token;
  double probability;
};

// What steps 2 to 8 leave of a row, as weights that are not normalised: p(t) = weights[t] / total.
struct Processed {
  SampleOutcome outcome = SampleOutcome::kSampled;
  int32_t best = -1;  // the token with the greatest z
  double total = 0;   // Σ weights, in the fixed order of `draw`
};

// One proposed token, and how likely its drafter was to propose it.
struct Proposal {
  int32_t token = -1;
  float weight = 1;            // the token's, among …
  double total = 1;            // … Σ of …
  std::vector<float> weights;  // … the drafter's over its own vocabulary; empty when it proposes this token for certain
  int32_t parent = -1;         // the proposal that this one follows; −1: the newest token
  float chance = 0;            // of being kept when its parent was, in a head's view; 0: it has none
};

// What could come next, in a drafter's view.
struct Candidate {
  int32_t token;  // an index into its vocabulary
  float probability;
};

// Holds scratch, so one per thread; carries nothing from one call to the next.
class Sampler {
 public:
  // `logits` (vocab) is overwritten. `history` may be null when `params.has_penalties()` is false.
  Sampled sample(float* logits, int32_t vocab, const SamplingParams& params, const History* history, uint64_t seed,
                 uint32_t sequence, uint32_t position);

  // One position of Algorithm 1 of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
  // (2023): the proposal x ~ q is kept with probability min(1, p(x) / q(x)), else the token comes from max(0, p − q),
  // normalised. So it is distributed as p, whatever q is. p is what `sample` draws from; u for keeping is
  // Draw::kAccept's, for the replacement Draw::kResidual's. Where greedy, or x was proposed for certain (q(x) = 1), it
  // is kept when it is the token that `sample` gives: as often, and no token changes. `vocabulary` are the tokens of
  // proposal.weights, ascending.
  Sampled verify(float* logits, int32_t vocab, const SamplingParams& params, const History* history, uint64_t seed,
                 uint32_t sequence, uint32_t position, const Proposal& proposal, const std::vector<int32_t>& vocabulary,
                 bool* kept);

  // A drafter's choice from its own `logits` (vocab) by Draw::kDraft: temperature, top-k, top-p and min-p apply, bias
  // and penalties don't. `proposal->token` is an index into its vocabulary; −1 for bad logits.
  void propose(float* logits, int32_t vocab, const SamplingParams& params, uint64_t seed, uint32_t sequence,
               uint32_t position, Proposal* proposal);

  // The `count` tokens that `sample` most likely gives at this position, if a drafter's `logits` (vocab), which are
  // overwritten, are near the model's: most likely first. Greedy: the most likely ones. Else those that win the race
  // with the drafter's weights and the position's noise; `vocabulary` has the numbers of its tokens. Temperature,
  // top-k, top-p and min-p apply, bias and penalties don't. None for bad logits.
  void candidates(float* logits, int32_t vocab, const SamplingParams& params, const std::vector<int32_t>& vocabulary,
                  uint64_t seed, uint32_t sequence, uint32_t position, int count, std::vector<Candidate>* out);

  // Steps 2 to 8: `logits` becomes weights (0 for what was removed). Greedy leaves weight 1 on one token. Speculation
  // compares and subtracts two of these.
  Processed process(float* logits, int32_t vocab, const SamplingParams& params, const History* history);

  // The same as a list, ascending by token, only of tokens with a probability above 0; empty for bad logits.
  std::vector<TokenProbability> probabilities(float* logits, int32_t vocab, const SamplingParams& params,
                                              const History* history);

  // A draw by inverse CDF in ascending token id, for weights from anywhere; `total` is `weight_sum` of them, sums are
  // in double. A drafter's own tokens, and those that replace rejected ones, are drawn so.
  static int32_t draw(const float* weights, int32_t vocab, double total, double u);
  static double weight_sum(const float* weights, int32_t vocab);

  // Log-probability of `token` under the model's own distribution (prompt scoring). Bad logits: NaN.
  static float logprob(const float* logits, int32_t vocab, int32_t token);

 private:
  // A token that top-k or top-p may keep: `key` orders as its logit does, `mass` counts towards what they want.
  struct Keepable {
    uint32_t key;
    float mass;
    int32_t token;
  };

  // Logarithms that a result is reported with, before `logits` are overwritten. False for bad logits.
  bool report(const float* logits, int32_t vocab, const SamplingParams& params, Sampled* result);
  float reported(const SamplingParams& params, int32_t token) const;
  int32_t race(float* logits, int32_t vocab, const SamplingParams& params, const History* history,
               const int32_t* tokens, NoiseKey key, int32_t places, Racer* first);
  void truncate(float* logits, int32_t vocab, const SamplingParams& params, float greatest);
  void collect(const float* logits, const float* weights, int32_t vocab, float least);
  void cut(double wanted);
  template <typename Unwanted>
  void drop(Unwanted unwanted);
  void scatter(float* logits, int32_t vocab) const;

  std::vector<float> raw_, weights_;     // (vocab)
  float shift_ = 0, log_sum_ = 0;        // of `raw_`: a log-probability is (z − shift) − log_sum
  std::vector<float> maxima_, ordered_;  // (row blocks)
  std::vector<double> sums_;             // (row blocks)
  std::vector<Keepable> candidates_;     // ascending by token
  std::vector<Keepable> narrowed_;       // scratch of `cut`
  std::vector<double> mass_;             // scratch of `cut`: of each bucket of keys
};

}  // namespace edgec

#endif  // EDGEC_SAMPLER_H_
