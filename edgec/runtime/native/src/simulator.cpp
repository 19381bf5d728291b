#include "simulator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <unordered_map>

#include "status.h"

namespace edgec {

void Histogram::add(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // Eight bits of the mantissa below the exponent; 1023 − 31 is the least exponent that is told apart.
  const int64_t bucket = static_cast<int64_t>(bits >> 44) - int64_t{1023 - 31} * kParts;
  ++counts_[static_cast<size_t>(std::clamp<int64_t>(bucket, 0, kOctaves * kParts - 1))];
  ++total_;
}

double Histogram::quantile(double q) const {
  if (total_ == 0) return 0.0;
  const uint64_t rank = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(q * static_cast<double>(total_))));
  uint64_t seen = 0;
  size_t bucket = 0;
  while ((seen += counts_[bucket]) < rank) ++bucket;
  // The middle of the bucket.
  const uint64_t bits = (bucket + uint64_t{1023 - 31} * kParts) << 44 | uint64_t{1} << 43;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

StepCost::StepCost(const edgec_sim_cost& cost)
    : fixed_(cost.fixed), per_row_(cost.per_row), per_sequence_(cost.per_sequence) {
  const auto good = [](double value) { return std::isfinite(value) && value >= 0.0; };
  require(good(fixed_) && good(per_row_) && good(per_sequence_), EDGEC_INVALID_ARGUMENT,
          "a step's cost must be finite and not negative");
  require(cost.table_count >= 0 && cost.table_count != 1, EDGEC_INVALID_ARGUMENT,
          "a table of costs has two rows or more");
  for (int32_t i = 0; i < cost.table_count; ++i) {
    require(good(cost.table_rows[i]) && good(cost.table_seconds[i]), EDGEC_INVALID_ARGUMENT,
            "a table of costs has a number that is negative or not finite");
    require(i == 0 || cost.table_rows[i] > cost.table_rows[i - 1], EDGEC_INVALID_ARGUMENT,
            "a table of costs must have ascending rows");
    rows_.push_back(cost.table_rows[i]);
    seconds_.push_back(cost.table_seconds[i]);
  }
}

double StepCost::seconds(int64_t rows, int64_t sequences) const {
  const double at = static_cast<double>(rows), shared = per_sequence_ * static_cast<double>(sequences);
  if (rows_.empty()) return fixed_ + per_row_ * at + shared;
  size_t right = 1;
  while (right + 1 < rows_.size() && rows_[right] < at) ++right;
  const double slope = (seconds_[right] - seconds_[right - 1]) / (rows_[right] - rows_[right - 1]);
  return std::max(0.0, seconds_[right - 1] + slope * (at - rows_[right - 1])) + shared;
}

void copy_stats(const Scheduler& scheduler, edgec_scheduler_stats* out) {
  const SchedulerStats s = scheduler.stats();
  *out = {s.waiting,
          s.running,
          s.batch_limit,
          s.steps,
          s.retries,
          s.releases,
          s.preemptions,
          s.finished,
          s.cancelled,
          s.prompt_tokens,
          s.cached_tokens,
          s.answer_tokens,
          s.computed_tokens,
          s.recomputed_tokens,
          s.rejected_tokens,
          s.padding_rows,
          s.batch_slots,
          s.batch_used,
          s.kv_token_steps,
          s.kv_slot_steps,
          s.wait_steps,
          s.max_wait_steps,
          scheduler.queue().fairness()};
}

namespace {

// A token that no other request has at this position, unless they share a prefix there.
int32_t token_of(uint64_t stream, int64_t position) {
  uint64_t x = (stream + 1) * 0x9e3779b97f4a7c15u ^ static_cast<uint64_t>(position) * 0xbf58476d1ce4e5b9u;
  x ^= x >> 31;
  x *= 0x94d049bb133111ebu;
  return static_cast<int32_t>(x >> 34);
}

class Simulation {
 public:
  Simulation(const SchedulerConfig& config, const StepCost& cost, const edgec_sim_request* requests, int32_t count)
      : scheduler_(config), cost_(cost), requests_(requests), count_(count), live_(static_cast<size_t>(count)) {}

  void run(edgec_sim_outcome* outcomes, edgec_sim_report* report);

 private:
  struct Live {
    double first = -1.0, latest = -1.0, finish = -1.0, longest = 0.0;
    int32_t answer = 0;
    Admission admission = Admission::kAccepted;
  };

  void arrive(int32_t index);
  void step();
  bool emit(int32_t index);

  Scheduler scheduler_;
  const StepCost& cost_;
  const edgec_sim_request* requests_;
  int32_t count_;
  std::vector<Live> live_;
  double now_ = 0.0, busy_ = 0.0;
  int32_t refused_ = 0, peak_ = 0;
  Histogram first_, gaps_, whole_, steps_;
  double longest_gap_ = 0.0;
  StepPlan plan_;
  std::vector<BlockCopy> copies_;
  std::vector<int32_t> tokens_;
  std::vector<StepResult> results_;
};

void Simulation::arrive(int32_t index) {
  const edgec_sim_request& request = requests_[index];
  const bool valid = request.prompt >= 1 && request.answer >= 1 && request.max_tokens >= 0 &&
                     request.prefix_tokens >= 0 && std::isfinite(request.arrival) &&
                     (index == 0 || request.arrival >= requests_[index - 1].arrival);
  if (!valid) {
    throw Error(EDGEC_INVALID_ARGUMENT, "request " + std::to_string(index) +
                                            ": prompt and answer must be at least 1, and arrivals must ascend");
  }
  SequenceSpec spec;
  spec.id = static_cast<SequenceId>(index);
  spec.priority = request.priority;
  spec.tenant = request.tenant;
  spec.weight = request.weight;
  spec.max_new_tokens = request.max_tokens;
  // A prompt that can't fit is refused by its length alone: don't write it all down first.
  spec.prompt.resize(static_cast<size_t>(std::min<int64_t>(request.prompt, int64_t{scheduler_.config().context} + 1)));
  for (size_t p = 0; p < spec.prompt.size(); ++p) {
    const bool shared = static_cast<int64_t>(p) < request.prefix_tokens;
    const uint64_t stream = shared ? ~request.prefix : static_cast<uint64_t>(index);
    spec.prompt[p] = token_of(stream, static_cast<int64_t>(p));
  }
  Live& live = live_[static_cast<size_t>(index)];
  live.admission = scheduler_.add(spec);
  refused_ += live.admission != Admission::kAccepted;
}

// A request's next token at the present time. True: it was the last one.
bool Simulation::emit(int32_t index) {
  Live& live = live_[static_cast<size_t>(index)];
  const edgec_sim_request& request = requests_[index];
  if (live.answer++ == 0) {
    live.first = now_;
    first_.add(now_ - request.arrival);
  } else {
    const double gap = now_ - live.latest;
    gaps_.add(gap);
    live.longest = std::max(live.longest, gap);
    longest_gap_ = std::max(longest_gap_, gap);
  }
  live.latest = now_;
  const bool last = live.answer >= request.answer || scheduler_.room(static_cast<SequenceId>(index)) == 1;
  if (last) {
    live.finish = now_;
    whole_.add(now_ - request.arrival);
  }
  return last;
}

void Simulation::step() {
  // Victims are preempted at the first try; a third one would mean that the plan can't be had at all.
  StepOutcome outcome = StepOutcome::kRetry;
  for (int tries = 0; tries < 3 && outcome == StepOutcome::kRetry; ++tries) {
    scheduler_.plan(&plan_);
    outcome = scheduler_.reserve(plan_, &copies_);
  }
  require(outcome == StepOutcome::kCommitted, EDGEC_INTERNAL, "the scheduler has work and gets no step done");
  const int64_t dead =
      scheduler_.config().static_batching ? plan_.slots - static_cast<int64_t>(plan_.chunks.size()) : 0;
  const double seconds = cost_.seconds(int64_t{plan_.rows} + plan_.padding,
                                       static_cast<int64_t>(plan_.chunks.size()) + std::max<int64_t>(0, dead));
  now_ += seconds;
  busy_ += seconds;
  steps_.add(seconds);
  peak_ = std::max(peak_, scheduler_.pool().counts().owned);
  tokens_.clear();
  results_.clear();
  tokens_.reserve(plan_.chunks.size());
  for (const Chunk& chunk : plan_.chunks) {
    if (!chunk.samples) continue;
    const int32_t index = static_cast<int32_t>(chunk.sequence);
    tokens_.push_back(token_of(chunk.sequence, int64_t{chunk.start} + chunk.count));
    results_.push_back({chunk.sequence, &tokens_.back(), 1, emit(index)});
  }
  scheduler_.commit(plan_, results_.data(), results_.size(), seconds);
}

void Simulation::run(edgec_sim_outcome* outcomes, edgec_sim_report* report) {
  int32_t next = 0;
  const double start = count_ > 0 ? requests_[0].arrival : 0.0;
  now_ = start;
  while (next < count_ || !scheduler_.idle()) {
    if (scheduler_.idle()) now_ = std::max(now_, requests_[next].arrival);
    while (next < count_ && requests_[next].arrival <= now_) arrive(next++);
    if (!scheduler_.idle()) step();
  }
  report->refused = refused_;
  report->seconds = now_ - start;
  report->busy_seconds = busy_;
  report->first_token_p50 = first_.quantile(0.5);
  report->first_token_p99 = first_.quantile(0.99);
  report->gap_p50 = gaps_.quantile(0.5);
  report->gap_p99 = gaps_.quantile(0.99);
  report->gap_max = longest_gap_;
  report->request_p50 = whole_.quantile(0.5);
  report->request_p99 = whole_.quantile(0.99);
  report->step_p50 = steps_.quantile(0.5);
  report->step_p99 = steps_.quantile(0.99);
  report->peak_blocks = peak_;
  copy_stats(scheduler_, &report->stats);
  for (int32_t i = 0; outcomes != nullptr && i < count_; ++i) {
    const Live& live = live_[static_cast<size_t>(i)];
    outcomes[i] = {live.first, live.finish, live.longest, live.answer, static_cast<int32_t>(live.admission)};
  }
}

}  // namespace

void simulate(const SchedulerConfig& config, const StepCost& cost, const edgec_sim_request* requests, int32_t count,
              edgec_sim_outcome* outcomes, edgec_sim_report* report) {
  Simulation(config, cost, requests, count).run(outcomes, report);
}

}  // namespace edgec
