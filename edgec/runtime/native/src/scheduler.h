// Who runs next, and on which blocks. A step is a transaction: `plan` (pure) → `reserve` (blocks) → the engine's
// forward → `commit` or `release`. Holds no tensors and reads no clock, so it is tested in milliseconds with a fake
// engine.
//
// One thread at a time. The usual step:
//
//   StepPlan plan = scheduler.plan();                       // empty: nothing to do
//   StepOutcome o = scheduler.reserve(plan, &copies);       // kRetry: plan again
//   … perform the copies, run the chunks, sample …
//   scheduler.commit(plan, results, count, seconds);        // or, when the forward failed, scheduler.release(plan)
//
// **Order.** Running sequences that need one token go first, then prompts in chunks under the token budget, then
// waiting sequences are started: of the tenant with the least virtual time (tokens served ÷ weight), the one whose
// priority is greatest, where waiting `aging_steps` steps counts as one level. When it doesn't fit, nobody passes it.
//
// **Bound on waiting.** Let N = max_batch, L = context, c = the fewest prompt tokens that a step can take =
// min(4, step_tokens − N + 1), and R = L + ⌈L ⁄ c⌉.
//   1. Of one tenant, a sequence of priority p is passed by a later one of priority p′ only if that came fewer than
//      (p′ − p) · aging_steps steps later; so by none that came 15 · aging_steps steps later.
//   2. While tenant t waits, tenant i starts a sequence only when its virtual time is not above t's. So i is never
//   served
//      more than t by more than N · L ⁄ wᵢ in tokens per weight, what its running sequences may still take.
//   3. A sequence with K others started ahead of it waits at most (N + K) · R steps. For among the running ones there
//   is
//      a *senior*; it is never a victim, is planned first, gets a token of its answer or c of its prompt in each step,
//      and stays senior until it leaves. So it leaves within R steps; everyone is senior at most once; and when nobody
//      runs, the first who waits is started (`add` refuses what doesn't fit an empty pool).
// 1 and 2 bound K, whatever arrives later.
//
// **Preemption.** When running sequences lack blocks, a plan names victims: of the lowest priority, the ones that lose
// the least work (positions in blocks that only they own), never the senior. `reserve` preempts them and answers
// kRetry. Their blocks go to the prefix cache, tail first, so that only what is really needed is computed again. No
// livelock: the senior advances in every committed step and is never a victim, so by the argument above everyone
// finishes. A sequence is started only while `headroom` free blocks per running sequence remain; that doubles with each
// preemption and shrinks again over steps without one, so preemption stays rare.
//
// **Static batching** is there for comparison: a batch is filled, its prompts are padded to the longest, and it runs
// until its longest member ends. All its blocks are set aside at the start. Rows of padding and of finished members
// count.
#ifndef EDGEC_SCHEDULER_H
#define EDGEC_SCHEDULER_H

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "batch_controller.h"
#include "block_pool.h"
#include "fair_queue.h"
#include "sequence.h"
#include "step_plan.h"

namespace edgec {

class Scheduler {
 public:
  // Throws EDGEC_INVALID_ARGUMENT, naming the field.
  explicit Scheduler(const SchedulerConfig& config);

  // ---- Sequences. Each call is allowed at any time, also between `reserve` and `commit`: results for a sequence that
  // was cancelled, finished or preempted in between are ignored.

  Admission add(const SequenceSpec& spec);
  bool cancel(SequenceId id);  // its blocks are back at once. False: no such sequence
  bool finish(SequenceId id);  // the same, counted as finished

  // A copy of `parent` that shares its blocks. With `last_token` the copy's last token is that one instead: so are n
  // answers made from one prompt, after the step that computed it. False: no parent, the child's id is taken, or the
  // parent is in a step (between `reserve` and `commit`).
  // Children run beside their parent; when there are more than the batch limit, the first ones run first.
  bool fork(SequenceId parent, SequenceId child, const int32_t* last_token = nullptr);

  bool preempt(SequenceId id);    // back to waiting, at its old place; its tokens stay. False: it doesn't run
  int32_t preempt_all_but_one();  // keeps the one with the most work done; how many were preempted
  void trim();                    // forgets the prefix cache

  // Proposes tokens to verify in the sequence's next step, after its own. Dropped where budget, context or blocks lack.
  void set_draft(SequenceId id, const int32_t* tokens, int32_t count);

  // ---- A step

  StepPlan plan() const;
  void plan(StepPlan* plan) const;  // the same, in memory that is used again

  // kIdle: an empty plan. kRetry: the plan is out of date, or its victims were preempted; nothing is reserved.
  // kCommitted: every position of every chunk has its block; `copies` are to be performed first, in order.
  StepOutcome reserve(const StepPlan& plan, std::vector<BlockCopy>* copies);

  // `results`: one per chunk with `samples` whose sequence is still there, in any order. `seconds`: how long the step
  // took. Throws EDGEC_INTERNAL, before anything is changed, when a result is missing, or has too many tokens.
  void commit(const StepPlan& plan, const StepResult* results, size_t count, double seconds);

  // Undoes `reserve`: tables, lengths, owners and the queue are as before. (Cached prefixes that gave way are gone.)
  void release(const StepPlan& plan);

  // ---- Looking. All of these throw EDGEC_NOT_FOUND for an unknown id, but `find`.

  const Sequence* find(SequenceId id) const;
  const std::vector<BlockId>& block_table(SequenceId id) const { return get(id).table; }
  const std::vector<int32_t>& tokens(SequenceId id) const { return get(id).tokens; }  // prompt and answer
  const std::vector<int32_t>& draft(SequenceId id) const { return get(id).draft; }
  int32_t token_at(SequenceId id, int32_t position) const;                     // of its own, or of the draft after them
  int32_t length(SequenceId id) const { return get(id).length; }               // positions computed
  int32_t computed_before(SequenceId id) const { return get(id).high_water; }  // the most that `length` has ever been
  int32_t cached_tokens(SequenceId id) const { return get(id).cached_tokens; }  // of the prompt, at its first start
  int32_t room(SequenceId id) const;  // tokens that may be appended; at 0 it has to be finished
  bool running(SequenceId id) const { return get(id).state == Sequence::State::kRunning; }

  int32_t waiting_count() const { return queue_.size(); }
  int32_t running_count() const { return static_cast<int32_t>(running_.size()); }
  bool idle() const { return running_.empty() && queue_.size() == 0; }
  int32_t batch_limit() const;  // B*
  SchedulerStats stats() const;
  const BlockPool& pool() const { return pool_; }
  const FairQueue& queue() const { return queue_; }
  const SchedulerConfig& config() const { return config_; }

  // "" when pool, tables, queue and counters fit together, else what doesn't. For tests and debug builds.
  std::string verify() const;

 private:
  friend class Planner;

  const Sequence& get(SequenceId id) const;
  Sequence* lookup(SequenceId id);
  bool remove(SequenceId id, uint64_t* counter);
  void leave(Sequence* sequence);  // gives its blocks and its place back, and forgets it
  void stop_running(Sequence* sequence);
  void drop_blocks(Sequence* sequence);
  void to_waiting(Sequence* sequence);
  void insert_running(Sequence* sequence);
  void choose_senior();
  void hash_full_blocks(Sequence* sequence) const;
  int32_t cacheable_blocks(const Sequence& sequence) const;  // at most so many may come from the prefix cache

  bool start(const Start& start);
  bool reserve_chunk(const Chunk& chunk, std::vector<BlockCopy>* copies);
  void undo_chunk(Sequence* sequence);
  void undo_start(Sequence* sequence);
  void rollback(const StepPlan& plan);
  void check(const StepPlan& plan, const StepResult* results, size_t count) const;
  void apply(const Chunk& chunk, const StepResult* result, Sequence* sequence);
  void account(const StepPlan& plan, double seconds);
  void changed();  // what was planned is out of date

  SchedulerConfig config_;
  BlockPool pool_;
  FairQueue queue_;
  BatchController controller_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::vector<Sequence*> running_;  // in the order of their first start; a child after its parent
  Sequence* senior_ = nullptr;
  bool in_flight_ = false;
  uint64_t version_ = 1, next_ticket_ = 0, next_ordinal_ = 0;
  double headroom_ = 1.0;      // blocks per running sequence that stay free when another is started
  int32_t static_slots_ = 0;   // members that the present static batch began with
  int32_t static_prompt_ = 0;  // its longest prompt
  int32_t static_blocks_ = 0;  // blocks set aside for it
  SchedulerStats stats_{};
};

}  // namespace edgec

#endif  // EDGEC_SCHEDULER_H
