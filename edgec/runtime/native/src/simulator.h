// The scheduler on a trace, with a model that only costs time.
#ifndef EDGEC_SIMULATOR_H
#define EDGEC_SIMULATOR_H

#include <cstdint>
#include <vector>

#include "edgec_scheduling.h"
#include "scheduler.h"

namespace edgec {

// Counts of positive numbers in buckets 0.4 % wide: quantiles of millions of them in constant memory. The buckets are
// read off a double's bits, so no logarithm is needed. Numbers beyond 2^±31 fall in the outermost bucket.
class Histogram {
 public:
  Histogram() : counts_(kOctaves * kParts, 0) {}
  void add(double value);
  double quantile(double q) const;  // nearest rank; 0 when nothing was added

 private:
  static constexpr int kOctaves = 62;
  static constexpr int kParts = 256;
  std::vector<uint64_t> counts_;
  uint64_t total_ = 0;
};

class StepCost {
 public:
  // Throws EDGEC_INVALID_ARGUMENT for numbers that aren't finite or negative, or a table that doesn't ascend.
  explicit StepCost(const edgec_sim_cost& cost);
  double seconds(int64_t rows, int64_t sequences) const;

 private:
  double fixed_, per_row_, per_sequence_;
  std::vector<double> rows_, seconds_;
};

// Throws EDGEC_INVALID_ARGUMENT, naming the request, for one that is malformed. `outcomes`: (count), or null.
void simulate(const SchedulerConfig& config, const StepCost& cost, const edgec_sim_request* requests, int32_t count,
              edgec_sim_outcome* outcomes, edgec_sim_report* report);

void copy_stats(const Scheduler& scheduler, edgec_scheduler_stats* stats);

}  // namespace edgec

#endif  // EDGEC_SIMULATOR_H
