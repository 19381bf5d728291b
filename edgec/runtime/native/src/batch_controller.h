// Chooses B*: the largest batch whose measured P99 step time meets the objective; and, in the same way, how many rows a
// step with prompts in it may have. Deterministic: what it says follows from the times that it was given.
#ifndef EDGEC_BATCH_CONTROLLER_H
#define EDGEC_BATCH_CONTROLLER_H

#include <cstdint>

namespace edgec {

// One limit under control. P99 of a window of kWindow steps exceeds the objective when more than kAllowed of them do:
// the limit then falls by a quarter, at once. It rises by `stride` after a whole window of which half the steps used
// the limit fully, and whose P99 is at most kMargin of the objective. Between margin and objective it stays: that is
// the hysteresis. A limit that failed isn't tried again for a number of windows that doubles each time it fails again,
// so that the limit doesn't saw up and down at the edge.
class Limit {
 public:
  static constexpr int32_t kWindow = 128;
  static constexpr int32_t kAllowed = kWindow / 100;  // exceedances that P99 of a window forgives
  static constexpr double kMargin = 0.9;
  static constexpr int32_t kMaxPatience = 64;

  Limit(int32_t least, int32_t most, int32_t stride) : least_(least), most_(most), stride_(stride), value_(most) {}

  // `full`: the step used all of the limit, so its time says what the limit costs.
  void observe(double seconds, double objective, bool full);
  int32_t value() const { return value_; }

 private:
  void restart();

  int32_t least_, most_, stride_, value_;
  // In this window: steps, and of these the ones that used the limit fully, were above the objective, above the margin.
  int32_t steps_ = 0, full_ = 0, over_ = 0, near_ = 0;
  int32_t failed_ = 0;                 // the limit that failed last; 0: none
  int32_t patience_ = 1, waited_ = 0;  // windows
};

class BatchController {
 public:
  // So many prompt tokens a step may always take, whatever the rows: a prompt must get on.
  static constexpr int32_t kLeastPrompt = 4;

  // `objective` seconds for P99 of a step; 0: no control, the limits are the greatest.
  BatchController(int32_t max_batch, int32_t step_tokens, double objective);

  // A committed step: how long it took, how many sequences and rows it had. A step of decodes alone teaches the batch
  // limit. One with more rows teaches the row limit; but when it kept above that for kLeastPrompt's sake, it is the
  // batch that is too large.
  void observe(double seconds, int32_t sequences, int32_t rows);

  int32_t batch() const { return batch_.value(); }  // B*
  int32_t rows() const { return rows_.value(); }    // of a step with prompts or drafts in it

 private:
  double objective_;
  Limit batch_, rows_;
};

}  // namespace edgec

#endif  // EDGEC_BATCH_CONTROLLER_H
