// A recurrent draft head: proposes tokens from the model's last hidden state, one after the other, without a cache.
//
//   s₀ = the hidden state (after the final norm) from which the newest token was sampled
//   for each proposal, with x the token before it:
//     u = [rms_norm(s) · norm₀, rms_norm(embedding(x)) · embed_norm];  s += down₀(silu(gate₀ u) · up₀ u)
//     u = rms_norm(s) · normᵦ;                                         s += downᵦ(silu(gateᵦ u) · upᵦ u)      for b ≥ 1
//     logits = head · (rms_norm(s) · norm)                             over the draft's own, smaller vocabulary
//
// After Ankner et al., "Hydra: Sequentially-Dependent Draft Heads" (2024); the reduced vocabulary follows Li et al.,
// "EAGLE-3" (2025). Its state is one vector per sequence, so prefix hits, forks and preemption need nothing of it.
#ifndef EDGEC_DRAFT_HEAD_H
#define EDGEC_DRAFT_HEAD_H

#include <vector>

#include "manifest.h"
#include "products.h"
#include "weights.h"

namespace edgec {

class DraftHead {
 public:
  // For up to `max_rows` sequences at a time.
  DraftHead(const Manifest& manifest, const Weights& weights, const Kernels& kernels, ThreadPool& threads,
            int max_rows);
  static size_t scratch_bytes(const Manifest& manifest, int max_rows);

  // One proposal for each row. states (rows, hidden) are advanced by tokens (rows); `logits(row)` is (vocab)
  // afterwards.
  void step(const int32_t* tokens, int rows, float* states);

  float* logits(int row) { return logits_.data() + static_cast<size_t>(row) * stride_; }
  int max_rows() const { return max_rows_; }
  int vocab() const { return static_cast<int>(weights_.draft.tokens.size()); }
  const std::vector<int32_t>& tokens() const { return weights_.draft.tokens; }
  int32_t token(int index) const { return weights_.draft.tokens[index]; }  // of the draft's vocabulary

 private:
  const Architecture model_;
  const int max_rows_;
  const Weights& weights_;
  const Kernels& kernels_;
  Products products_;
  size_t stride_;  // of logits
  std::vector<float> inputs_, gate_up_, delta_, logits_;
};

}  // namespace edgec

#endif  // EDGEC_DRAFT_HEAD_H
