// What the scheduler knows about one sequence.
#ifndef EDGEC_SEQUENCE_H
#define EDGEC_SEQUENCE_H

#include <cstdint>
#include <string>
#include <vector>

#include "block_pool.h"
#include "step_plan.h"

namespace edgec {

struct Tenant;

struct Sequence {
  enum class State : uint8_t { kWaiting, kRunning };

  SequenceId id = 0;
  State state = State::kWaiting;
  bool compute_all = false;
  bool started = false;  // has run before (and was charged for its prompt)
  int32_t priority = 0;
  int32_t prompt = 0;     // tokens
  int32_t max_total = 0;  // tokens, prompt and answer
  Tenant* tenant = nullptr;
  uint64_t ticket = 0;   // order of arrival
  uint64_t ordinal = 0;  // order of the first start
  int64_t rank = 0;      // place in its tenant's queue: the least goes first
  uint64_t arrival_step = 0;
  std::string cache_key;

  std::vector<int32_t> tokens;   // prompt and answer so far
  std::vector<int32_t> draft;    // proposed after them
  std::vector<BlockId> table;    // block i holds positions [i · block_size, (i + 1) · block_size)
  std::vector<uint64_t> hashes;  // of the chain after each full block of tokens
  int32_t length = 0;            // positions whose keys and values are there
  int32_t high_water = 0;        // the most that `length` has been
  int32_t cached_tokens = 0;
  int32_t published = 0;  // blocks of the table that are published; the last one's serial:
  uint64_t serial = 0;

  // Between reserve and commit or release.
  bool in_flight = false;
  int32_t appended = 0;       // blocks that this step added to the table
  BlockId shared = kNoBlock;  // what copy-on-write replaced …
  int32_t shared_at = 0;      // … at this place in the table

  int32_t pending() const { return static_cast<int32_t>(tokens.size()) - length; }
};

}  // namespace edgec

#endif  // EDGEC_SEQUENCE_H
