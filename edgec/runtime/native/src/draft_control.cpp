#include "draft_control.h"

#include <algorithm>

namespace edgec {
namespace {

constexpr double kBlend = 0.1;        // of the newest step, and at most this much of the newest outcome
constexpr double kForget = 0.98;      // per step, of the line through steps
constexpr double kRowShare = 0.1;     // of a pass with one row that another one costs, until two sizes have been seen
constexpr double kDraftShare = 0.08;  // of a pass that one proposal costs, until one has been made
constexpr double kMargin = 1.02;      // what it has to gain, so that noise doesn't switch it on
constexpr int32_t kFirstRest = 32, kLongestRest = 512;  // steps between trials
constexpr int kTrial = 3;
constexpr int64_t kStale = 256;  // steps after which a measured time says nothing of now: clocks and neighbours change

void blend(double* value, double newest) {
  // A step that the system interrupted says little: it counts as at most twice the usual.
  *value = *value == 0.0 ? newest : *value + kBlend * (std::min(newest, 2.0 * *value) - *value);
}

}  // namespace

DraftControl::Source::Source(double first) : backoff(kFirstRest) {
  alpha.fill(first);
  seen.fill(2);  // the first guess counts as two outcomes
}

DraftControl::DraftControl(int fixed) : fixed_(fixed), row_share_(kRowShare) {}

void DraftControl::drafted(int steps, double seconds) {
  if (steps > 0) blend(&draft_seconds_, seconds / steps);
}

void DraftControl::stepped(int rows, double seconds) {
  ++steps_;
  if (rows <= kMostRows) {
    if (steps_ - step_measured_[rows] > kStale) step_seconds_[rows] = 0.0;
    blend(&step_seconds_[rows], seconds);
    step_measured_[rows] = steps_;
  }
  weight_ = kForget * weight_ + 1.0;
  x_ = kForget * x_ + rows;
  y_ = kForget * y_ + seconds;
  xx_ = kForget * xx_ + static_cast<double>(rows) * rows;
  xy_ = kForget * xy_ + rows * seconds;
  const double spread = weight_ * xx_ - x_ * x_;
  if (spread <= 0.05 * weight_ * weight_) return;  // the steps were too much alike
  const double slope = std::max(0.0, (weight_ * xy_ - x_ * y_) / spread);
  const double one = (y_ - slope * (x_ - weight_)) / weight_;
  if (one > 0.0) row_share_ = slope / one;
}

void DraftControl::verified(DraftSource source, int proposed, int kept) {
  Source& s = sources_[static_cast<size_t>(source)];
  for (int i = 0; i < std::min(proposed, kept + 1) && i < kMostDrafts; ++i) {
    s.seen[i] = std::min<int32_t>(s.seen[i] + 1, 64);
    s.alpha[i] += ((i < kept ? 1.0 : 0.0) - s.alpha[i]) / s.seen[i];
  }
}

double DraftControl::seconds(int rows) const {
  if (rows <= kMostRows && step_seconds_[rows] > 0.0 && steps_ - step_measured_[rows] <= kStale) {
    return step_seconds_[rows];
  }
  const double mean_x = x_ / weight_, mean_y = y_ / weight_;
  const double slope = row_share_ * mean_y / (1.0 + row_share_ * (mean_x - 1.0));
  return std::max(mean_y + slope * (rows - mean_x), 0.1 * mean_y);
}

DraftControl::Choice DraftControl::best(DraftSource source, int proposing, int decoding) const {
  const Source& s = sources_[static_cast<size_t>(source)];
  const double plain = seconds(decoding);
  const double draft = source != DraftSource::kHead ? 0.0 : draft_seconds_ > 0.0 ? draft_seconds_ : kDraftShare * plain;
  double expected = 1.0, run = 1.0;
  Choice best = {0, kMargin * decoding / plain};
  for (int gamma = 1; gamma <= kMostDrafts; ++gamma) {
    run *= s.alpha[gamma - 1];
    expected += run;
    const double tokens = decoding - proposing + proposing * expected;
    // More rows are never faster: where it was measured so, the smaller pass was disturbed.
    const double pass = std::max(seconds(decoding + proposing * gamma), plain);
    const double rate = tokens / (pass + gamma * draft);
    if (rate > best.rate) best = {gamma, rate};
  }
  return best;
}

bool DraftControl::prefers(DraftSource first, DraftSource second) const {
  if (fixed_ > 0) return false;  // what is fixed follows no clock
  return weight_ == 0.0 || best(first, 1, 1).rate > best(second, 1, 1).rate;
}

int DraftControl::length(DraftSource source, int proposing, int decoding) {
  if (fixed_ > 0) return latest_ = fixed_;
  if (proposing == 0 || weight_ == 0.0) return latest_ = 0;  // a first step without tells what one costs
  Source& s = sources_[static_cast<size_t>(source)];
  int length = best(source, proposing, decoding).length;
  if (length > 0) {
    s.backoff = kFirstRest;
    s.countdown = kFirstRest;
  } else if (--s.countdown < 0) {
    s.backoff = std::min(2 * s.backoff, kLongestRest);
    s.countdown = s.backoff;
    length = kTrial;
  }
  return latest_ = length;
}

}  // namespace edgec
