#include "batch_controller.h"

#include <algorithm>

namespace edgec {

void Limit::restart() { steps_ = full_ = over_ = near_ = 0; }

void Limit::observe(double seconds, double objective, bool full) {
  ++steps_;
  full_ += full;
  near_ += seconds > kMargin * objective;
  if (seconds > objective && ++over_ > kAllowed) {
    patience_ = value_ == failed_ ? std::min(2 * patience_, kMaxPatience) : 1;
    failed_ = value_;
    waited_ = 0;
    // A quarter, in whole strides, and at least one.
    value_ = std::max(least_, value_ - std::max(stride_, value_ / 4 / stride_ * stride_));
    restart();
    return;
  }
  if (steps_ < kWindow) return;
  const bool room = near_ <= kAllowed && 2 * full_ >= kWindow;
  restart();
  ++waited_;
  if (!room || value_ >= most_) return;
  const int32_t next = std::min(most_, value_ + stride_);
  if (failed_ != 0 && next >= failed_ && waited_ < patience_) return;
  value_ = next;
}

BatchController::BatchController(int32_t max_batch, int32_t step_tokens, int32_t block_size, double objective)
    : objective_(objective),
      batch_(1, max_batch, 1),
      tokens_(std::min(block_size, step_tokens), step_tokens, std::min(block_size, step_tokens)) {}

void BatchController::observe(double seconds, int32_t sequences, int32_t prompt_tokens) {
  if (objective_ <= 0.0) return;
  const bool blame_batch = prompt_tokens == 0 || (tokens_.at_least() && seconds > objective_);
  if (blame_batch) {
    batch_.observe(seconds, objective_, sequences >= batch_.value());
  } else {
    tokens_.observe(seconds, objective_, prompt_tokens >= tokens_.value());
  }
}

}  // namespace edgec
