// The vocabulary of a step: what is asked for, what is planned, what came of it. Plain data.
#ifndef EDGEC_STEP_PLAN_H
#define EDGEC_STEP_PLAN_H

#include <cstdint>
#include <string>
#include <vector>

#include "block_pool.h"

namespace edgec {

using SequenceId = uint64_t;

constexpr int32_t kMinPriority = -8;
constexpr int32_t kMaxPriority = 7;

struct SchedulerConfig {
  int32_t blocks = 0;         // in the pool
  int32_t block_size = 16;    // positions in a block
  BlockId first_block = 0;    // number of the pool's first block
  int32_t context = 0;        // tokens that a sequence may have, prompt and answer
  int32_t max_batch = 16;     // sequences in a step
  int32_t step_tokens = 128;  // rows in a step; at least max_batch
  int32_t max_waiting = 256;
  int32_t aging_steps = 32;  // a waiting sequence gains one priority level after this many steps
  bool static_batching = false;
  bool prefix_cache = true;
  double step_slo = 0.0;        // seconds; 0: no controller
  HashFunction hash = nullptr;  // nullptr: the usual one
};

struct SequenceSpec {
  SequenceId id = 0;  // the caller's; unique among those alive
  std::vector<int32_t> prompt;
  int32_t priority = 0;  // kMinPriority … kMaxPriority
  uint64_t tenant = 0;
  double weight = 1.0;         // of the tenant; the latest counts
  int32_t max_new_tokens = 0;  // 0: until the context is full
  std::string cache_key;       // PrefixKey's bytes; prefixes are shared only among equal keys
  bool compute_all = false;    // every prompt position must be computed (its logits are wanted): no prefix is reused
};

enum class Admission : int32_t { kAccepted = 0, kQueueFull = 1, kTooLong = 2, kInvalid = 3 };

// Positions [start, start + count) of a sequence. The last `drafts` of them are proposed tokens (`Scheduler::draft`),
// the others are its own (`Scheduler::tokens`). With `samples`, logits are wanted at the last 1 + drafts positions.
struct Chunk {
  SequenceId sequence;
  int32_t start;
  int32_t count;
  int32_t drafts;
  bool samples;
};

// A waiting sequence that the step starts, or starts again, with `blocks` full blocks taken from the prefix cache.
struct Start {
  SequenceId sequence;
  int32_t blocks;
};

struct StepPlan {
  std::vector<Chunk> chunks;        // decodes first, then prompts in order of service
  std::vector<Start> starts;        // of the chunks' sequences
  std::vector<SequenceId> victims;  // non-empty: blocks lack; `reserve` preempts these and answers kRetry
  int32_t rows = 0;                 // sum of the chunks' counts
  int32_t padding = 0;   // static batching: rows that it computes for nothing; may run as dummies in a scratch block
  int32_t longest = 0;   // static batching: the prompt that this batch's others are padded to
  int32_t slots = 0;     // sequences that the step could have held, of those that there are
  uint64_t version = 0;  // of the scheduler's state

  bool empty() const { return chunks.empty() && victims.empty(); }
};

enum class StepOutcome : int32_t { kIdle = 0, kCommitted = 1, kDeferred = 2, kRetry = 3, kFailed = 4 };

// Before the forward, in this order: copy all of block `from` to block `to`.
struct BlockCopy {
  BlockId from, to;
};

// What came of a chunk with `samples`: `count` new tokens. Without drafts one (or none, when it finishes); with drafts
// those that were accepted and one more.
struct StepResult {
  SequenceId sequence;
  const int32_t* tokens;
  int32_t count;
  bool finish;
};

struct SchedulerStats {
  int32_t waiting, running, batch_limit;
  uint64_t steps, retries, releases, preemptions, finished, cancelled;
  uint64_t prompt_tokens, cached_tokens, answer_tokens, computed_tokens, recomputed_tokens, rejected_tokens;
  uint64_t padding_rows;
  uint64_t batch_slots, batch_used;        // sums over steps: occupancy = used / slots
  uint64_t kv_token_steps, kv_slot_steps;  // sums over steps: utilisation = tokens / slots
  uint64_t wait_steps, max_wait_steps;     // from `add` to the first start
};

}  // namespace edgec

#endif  // EDGEC_STEP_PLAN_H
