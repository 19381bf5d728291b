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

BatchController::BatchController(int32_t max_batch, int32_t step_tokens, double objective)
    : objective_(objective),
      batch_(1, max_batch, 1),
      rows_(std::min(kLeastPrompt, step_tokens), step_tokens, std::min(kLeastPrompt, step_tokens)) {}

void BatchController::observe(double seconds, int32_t sequences, int32_t rows) {
  if (objective_ <= 0.0) return;
  if (rows <= sequences || (rows > rows_.value() && seconds > objective_)) {
    batch_.observe(seconds, objective_, sequences >= batch_.value());
  } else {
    rows_.observe(seconds, objective_, rows >= rows_.value());
  }
}

}  // namespace edgec
