// An engine without a model. Its "keys and values" are digests of all tokens up to a position, kept in blocks as real
// ones would be, so that every read of a wrong, stale or overwritten slot is noticed.
#ifndef EDGEC_FAKE_ENGINE_H
#define EDGEC_FAKE_ENGINE_H

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "scheduler.h"

namespace edgec {

class FakeEngine {
 public:
  explicit FakeEngine(const SchedulerConfig& config)
      : config(config),
        scheduler(config),
        slots_(static_cast<size_t>(config.first_block + config.blocks) * static_cast<size_t>(config.block_size), 0) {}

  // The token that follows `tokens`: a function of all of them, so that tokens don't depend on how they were computed.
  static int32_t next_token(const std::vector<int32_t>& tokens, size_t count) {
    uint64_t h = 7;
    for (size_t i = 0; i < count; ++i) h = (h ^ static_cast<uint64_t>(tokens[i])) * 0x9e3779b97f4a7c15u;
    return static_cast<int32_t>((h >> 33) % 97);
  }

  // Performs the reserved step's copies and forward.
  void forward(const StepPlan& plan, const std::vector<BlockCopy>& copies) {
    const size_t size = static_cast<size_t>(config.block_size);
    for (const BlockCopy& copy : copies) {
      for (size_t i = 0; i < size; ++i) {
        slots_[static_cast<size_t>(copy.to) * size + i] = slots_[static_cast<size_t>(copy.from) * size + i];
      }
    }
    for (const Chunk& chunk : plan.chunks) {
      if (scheduler.find(chunk.sequence) == nullptr) continue;
      const std::vector<BlockId>& table = scheduler.block_table(chunk.sequence);
      uint64_t digest = 7;
      for (int32_t p = 0; p < chunk.start + chunk.count; ++p) {
        digest = (digest ^ static_cast<uint64_t>(scheduler.token_at(chunk.sequence, p))) * 0x9e3779b97f4a7c15u + 1;
        uint64_t& slot =
            slots_[static_cast<size_t>(table[static_cast<size_t>(p) / size]) * size + static_cast<size_t>(p) % size];
        if (p >= chunk.start) {
          slot = digest;
        } else if (slot != digest) {
          ++wrong_reads;
        }
      }
    }
  }

  // One whole step; sequences end after `answer[id]` tokens (10 when it names none).
  StepOutcome step(double seconds = 0.001) {
    StepOutcome outcome = StepOutcome::kRetry;
    for (int tries = 0; tries < 3 && outcome == StepOutcome::kRetry; ++tries) {
      plan = scheduler.plan();
      outcome = scheduler.reserve(plan, &copies);
    }
    if (outcome != StepOutcome::kCommitted) return outcome;
    forward(plan, copies);
    commit(seconds);
    return outcome;
  }

  void commit(double seconds = 0.001) {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<StepResult> results;
    tokens.reserve(plan.chunks.size());
    for (const Chunk& chunk : plan.chunks) {
      const Sequence* sequence = scheduler.find(chunk.sequence);
      if (!chunk.samples || sequence == nullptr || !sequence->in_flight) continue;
      // Greedy verification: a draft token is accepted when it is the one that would have come.
      std::vector<int32_t> all = sequence->tokens, fresh;
      for (int32_t d = 0; d <= chunk.drafts; ++d) {
        const int32_t token = next_token(all, all.size());
        fresh.push_back(token);
        all.push_back(token);
        if (d == chunk.drafts || sequence->draft[static_cast<size_t>(d)] != token) break;
      }
      const int32_t wanted = answer.count(chunk.sequence) ? answer[chunk.sequence] : 10;
      const int32_t left = wanted - (static_cast<int32_t>(sequence->tokens.size()) - sequence->prompt);
      if (static_cast<int32_t>(fresh.size()) > left) fresh.resize(static_cast<size_t>(left));
      const bool finish = static_cast<int32_t>(fresh.size()) == left ||
                          scheduler.room(chunk.sequence) == static_cast<int32_t>(fresh.size());
      if (finish) {
        all.resize(sequence->tokens.size() + fresh.size());
        answers[chunk.sequence] = all;
      }
      tokens.push_back(fresh);
      results.push_back({chunk.sequence, tokens.back().data(), static_cast<int32_t>(tokens.back().size()), finish});
    }
    scheduler.commit(plan, results.data(), results.size(), seconds);
  }

  SchedulerConfig config;
  Scheduler scheduler;
  StepPlan plan;
  std::vector<BlockCopy> copies;
  std::map<SequenceId, int32_t> answer;
  std::map<SequenceId, std::vector<int32_t>> answers;  // prompt and answer of those that finished
  int wrong_reads = 0;

 private:
  std::vector<uint64_t> slots_;
};

}  // namespace edgec

#endif  // EDGEC_FAKE_ENGINE_H
