#include "draft_control.h"

#include <algorithm>
#include <cmath>

namespace edgec {
namespace {

constexpr double kBlend = 0.1;                       // of the newest step, and at most this much of the newest outcome
constexpr double kPaceBlend = 0.3, kMostPace = 2.0;  // of the newest step; and how much it may say at most
constexpr double kForget = 0.98;                     // per step, of the line through steps
constexpr double kRowShare = 0.1;     // of a pass with one row that another one costs, until two sizes have been seen
constexpr double kDraftShare = 0.08;  // of a pass that one proposal costs, until one has been made
constexpr double kMargin = 1.02;      // what it has to gain, so that neither noise nor what isn't timed decides
constexpr int32_t kFirstRest = 32, kLongestRest = 512;  // steps between trials
constexpr int kTrial = 3;
constexpr int32_t kTreeTrial = 32;     // sequences' steps: fewer say little, an answer being a matter of luck
constexpr int64_t kPlainAgain = 128;   // steps after which a plain pass is timed again
constexpr int32_t kExploreFirst = 6;   // trees that are as large as they can be, to see what rows cost;
constexpr int32_t kExplore = 64;       // and one in so many
constexpr int kExploredRows = 8;       // then, for one sequence: what tiles of rows hold
constexpr double kForgetTrees = 0.98;  // per step with trees
constexpr double kLongestStep = 4;     // with a tree, over one without
constexpr double kPrior = 8;           // outcomes that the drafter's own probability counts for
constexpr double kMostJudged = 400;
constexpr double kFirstChance = 0.8;  // of the likeliest token behind a node, before the head was asked
constexpr int64_t kStale = 2048;  // steps after which a measured time says nothing of now: clocks and neighbours change

void blend(double* value, double newest) {
  // A step that the system interrupted says little: it counts as at most twice the usual.
  *value = *value == 0.0 ? newest : *value + kBlend * (std::min(newest, 2.0 * *value) - *value);
}

int32_t longer(int32_t rest) { return std::min(2 * rest, kLongestRest); }

}  // namespace

DraftControl::Source::Source(double first) : backoff(kFirstRest) {
  alpha.fill(first);
  seen.fill(2);  // the first guess counts as two outcomes
}

DraftControl::Crowd::Crowd() : backoff(kFirstRest) {}

DraftControl::DraftControl(int fixed) : fixed_(fixed), row_share_(kRowShare) {}

void DraftControl::drafted(int steps, double first, double all) {
  if (steps > 0) blend(&first_draft_, first / pace_);
  if (steps > 1) blend(&later_draft_, (all - first) / (steps - 1) / pace_);
}

void DraftControl::stepped(int rows, double seconds) {
  ++steps_;
  if (rows <= kMostRows) {
    if (steps_ - step_measured_[rows] > kStale) step_seconds_[rows] = 0.0;
    const double usual = step_seconds_[rows] * pace_;
    if (usual > 0.0) pace_ *= std::pow(std::clamp(seconds / usual, 1.0 / kMostPace, kMostPace), kPaceBlend);
  }
  seconds /= pace_;
  if (rows <= kMostRows) {
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

// As measured lately; between two sizes that were, in proportion; else by the line through recent steps, and no less
// than a smaller size.
double DraftControl::seconds(int rows) const {
  const auto known = [&](int r) { return step_seconds_[r] > 0.0 && steps_ - step_measured_[r] <= kStale; };
  int below = std::min(rows, kMostRows), above = rows;
  while (below > 0 && !known(below)) --below;
  while (above <= kMostRows && !known(above)) ++above;
  if (below == rows) return step_seconds_[rows];
  if (below > 0 && above <= kMostRows) {
    const double share = static_cast<double>(rows - below) / (above - below);
    return step_seconds_[below] + share * (step_seconds_[above] - step_seconds_[below]);
  }
  const double mean_x = x_ / weight_, mean_y = y_ / weight_;
  const double slope = row_share_ * mean_y / (1.0 + row_share_ * (mean_x - 1.0));
  const double line = std::max(mean_y + slope * (rows - mean_x), 0.1 * mean_y);
  if (below > 0) return std::max(line, step_seconds_[below] + slope * (rows - below));
  return above <= kMostRows ? std::min(line, step_seconds_[above]) : line;
}

DraftControl::Choice DraftControl::best(DraftSource source, int proposing, int decoding) const {
  const Source& s = sources_[static_cast<size_t>(source)];
  const double plain = seconds(decoding);
  double draft = 0.0, later = 0.0;
  if (source == DraftSource::kHead) {
    draft = first_draft_ > 0.0 ? first_draft_ : kDraftShare * plain;
    later = first_draft_ > 0.0 ? later_draft() : draft;
  }
  double expected = 1.0, run = 1.0;
  Choice best = {0, kMargin * decoding / plain};
  for (int gamma = 1; gamma <= kMostDrafts; ++gamma) {
    run *= s.alpha[gamma - 1];
    expected += run;
    const double tokens = decoding - proposing + proposing * expected;
    // More rows are never faster: where it was measured so, the smaller pass was disturbed.
    const double pass = std::max(seconds(decoding + proposing * gamma), plain);
    const double rate = tokens / (pass + draft + (gamma - 1) * later);
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
    s.countdown = s.backoff = longer(s.backoff);
    length = kTrial;
  }
  return latest_ = length;
}

// ---- Trees ----------------------------------------------------------------------------------------------------------

int DraftControl::chance_class(float chance) {
  const double halves = -2.0 * std::log2(std::max(static_cast<double>(chance), 1e-9));
  return std::clamp(static_cast<int>(halves), 0, kChances - 1);
}

size_t DraftControl::crowd_of(int decoding, bool greedy) {
  size_t crowd = 0;
  while (crowd + 1 < kCrowds && decoding > 1) {
    decoding = (decoding + 1) / 2;
    ++crowd;
  }
  return greedy ? crowd : crowd + kCrowds;
}

double DraftControl::likely(float chance, bool greedy) const {
  const Judged& judged = judged_[greedy ? 1 : 0][static_cast<size_t>(chance_class(chance))];
  return std::min(1.0, (kPrior * static_cast<double>(chance) + judged.kept) / (kPrior + judged.seen));
}

void DraftControl::judged(float chance, bool greedy, bool kept) {
  Judged& judged = judged_[greedy ? 1 : 0][static_cast<size_t>(chance_class(chance))];
  judged.seen += 1;
  judged.kept += kept ? 1 : 0;
  if (judged.seen <= kMostJudged) return;
  judged.seen /= 2;
  judged.kept /= 2;
}

void DraftControl::Rate::add(int tokens_now, double seconds_now) {
  tokens = kForgetTrees * tokens + tokens_now;
  seconds = kForgetTrees * seconds + seconds_now;
  steps += 1;
}

double DraftControl::seconds_per_token(int decoding, bool greedy) const {
  const Rate& all = crowds_[crowd_of(decoding, greedy)].all;
  return all.steps * decoding < kTreeTrial ? seconds(decoding) / decoding : all.seconds / all.tokens;
}

bool DraftControl::trees_pay(int decoding, bool greedy) {
  if (weight_ == 0.0) return false;  // a first step without tells what one costs
  Crowd& crowd = crowds_[crowd_of(decoding, greedy)];
  if (crowd.rest > 0) {
    crowd.rest -= 1;
    return false;
  }
  const Rate& rate = crowd.by_head;
  if (rate.steps * decoding < kTreeTrial) return true;
  if (decoding <= kMostRows && steps_ - step_measured_[static_cast<size_t>(decoding)] > kPlainAgain) return false;
  if (rate.tokens / rate.seconds > kMargin * decoding / seconds(decoding)) {
    crowd.backoff = kFirstRest;
    return true;
  }
  crowd.by_head = Rate();
  crowd.rest = crowd.backoff;
  crowd.backoff = longer(crowd.backoff);
  return false;
}

double DraftControl::follow_gain(double reach, int decoding, bool greedy) const {
  const double row = std::max(0.0, seconds(decoding + kExploredRows) - seconds(decoding)) / kExploredRows;
  return kFirstChance * reach * seconds_per_token(decoding, greedy) - row;
}

int DraftControl::rows(const std::vector<double>& reach, int decoding, bool greedy) {
  const int count = static_cast<int>(reach.size());
  if (count == 0 || weight_ == 0.0) return latest_ = 0;
  const int32_t choice = crowds_[crowd_of(decoding, greedy)].choices++;
  if (decoding < kExploredRows && (choice < kExploreFirst || choice % kExplore == 0))
    return latest_ = std::min(count, kExploredRows - decoding);
  const double worth = seconds_per_token(decoding, greedy), plain = seconds(decoding);
  double gain = 0, most = 0, pass = plain;
  int best = 0;
  for (int i = 0; i < count; ++i) {
    gain += reach[static_cast<size_t>(i)];
    pass = std::max(pass, seconds(decoding + i + 1));
    const double net = gain * worth - (pass - plain);
    if (net <= most) continue;
    most = net;
    best = i + 1;
  }
  return latest_ = best;
}

void DraftControl::grown(int decoding, bool greedy, bool headed, int tokens, double seconds) {
  Crowd& crowd = crowds_[crowd_of(decoding, greedy)];
  // A step that was interrupted says little.
  const double counted = std::min(seconds / pace_, kLongestStep * this->seconds(decoding));
  crowd.all.add(tokens, counted);
  if (headed) crowd.by_head.add(tokens, counted);
}

}  // namespace edgec
