// Scheduler::plan: which chunks of whom. Pure; the pool's future is followed in a few numbers.
#include <algorithm>
#include <cmath>

#include "scheduler.h"

namespace edgec {

class Planner {
 public:
  Planner(const Scheduler& scheduler, StepPlan* plan)
      : s_(scheduler),
        plan_(*plan),
        size_(scheduler.config_.block_size),
        limit_(scheduler.batch_limit()),
        available_(scheduler.pool_.available()) {}

  void continuous();
  void static_batch();

 private:
  struct Loss {
    const Sequence* sequence;
    int32_t positions;
  };

  int32_t blocks(int64_t positions) const { return static_cast<int32_t>((positions + size_ - 1) / size_); }
  int32_t owners(BlockId block) const;
  bool copies(const Sequence& sequence) const;
  int32_t need(const Sequence& sequence, int32_t count) const;
  int32_t fit(const Sequence& sequence, int32_t count) const;
  void take(const Sequence& sequence, int32_t count);
  void add_chunk(const Sequence& sequence, int32_t start, int32_t count);
  bool is_victim(const Sequence& sequence) const;
  Loss loss(const Sequence& sequence) const;
  int32_t senior_least() const;
  int32_t must_have(int32_t senior_count);
  bool name_victims(int32_t senior_count);
  void decodes();
  void prompts();
  void starts();
  void drafts();
  int32_t growth(const Sequence& sequence) const;

  const Scheduler& s_;
  StepPlan& plan_;
  const int32_t size_, limit_;
  int32_t available_;
  int32_t selected_ = 0;        // sequences in the plan
  int32_t prompt_budget_ = 0;   // rows left for prompts
  int32_t promised_ = 0;        // blocks that started prompts will still want
  std::vector<BlockId> given_;  // shares that copy-on-write (or a victim) gives up in this plan
};

int32_t Planner::owners(BlockId block) const {
  const int32_t owners = s_.pool_.owners(block);
  if (owners == 1 || given_.empty()) return owners;
  return owners - static_cast<int32_t>(std::count(given_.begin(), given_.end(), block));
}

bool Planner::copies(const Sequence& sequence) const {
  return sequence.length % size_ != 0 && owners(sequence.table[sequence.length / size_]) > 1;
}

// Blocks that `count` more positions take.
int32_t Planner::need(const Sequence& sequence, int32_t count) const {
  return blocks(int64_t{sequence.length} + count) - static_cast<int32_t>(sequence.table.size()) + copies(sequence);
}

// The most of `count` positions that there are blocks for.
int32_t Planner::fit(const Sequence& sequence, int32_t count) const {
  if (need(sequence, count) <= available_) return count;
  const int64_t blocks = static_cast<int64_t>(sequence.table.size()) + available_ - copies(sequence);
  return copies(sequence) && available_ == 0
             ? 0
             : static_cast<int32_t>(std::clamp<int64_t>(blocks * size_ - sequence.length, 0, count));
}

void Planner::take(const Sequence& sequence, int32_t count) {
  available_ -= need(sequence, count);
  if (copies(sequence)) given_.push_back(sequence.table[sequence.length / size_]);
}

void Planner::add_chunk(const Sequence& sequence, int32_t start, int32_t count) {
  const bool samples = start + count == static_cast<int32_t>(sequence.tokens.size());
  plan_.chunks.push_back({sequence.id, start, count, 0, samples});
  plan_.rows += count;
  ++selected_;
}

bool Planner::is_victim(const Sequence& sequence) const {
  return std::find(plan_.victims.begin(), plan_.victims.end(), sequence.id) != plan_.victims.end();
}

// What preempting it would throw away: positions in blocks that nobody else holds.
Planner::Loss Planner::loss(const Sequence& sequence) const {
  int32_t positions = sequence.length;
  for (const BlockId block : sequence.table) positions -= s_.pool_.owners(block) > 1 ? size_ : 0;
  return {&sequence, std::max(positions, 0)};
}

// Blocks that the senior's next positions and all decodes take, victims aside. Leaves nothing behind but `given_`.
int32_t Planner::must_have(int32_t senior_count) {
  int32_t sum = 0, chosen = 0;
  const auto want = [&](const Sequence& sequence, int32_t count) {
    sum += need(sequence, count);
    if (copies(sequence)) given_.push_back(sequence.table[sequence.length / size_]);
    ++chosen;
  };
  want(*s_.senior_, senior_count);
  for (const Sequence* sequence : s_.running_) {
    if (chosen == limit_) break;
    if (sequence != s_.senior_ && sequence->pending() == 1 && !is_victim(*sequence)) want(*sequence, 1);
  }
  return sum;
}

// Names victims until the rest has the blocks that it must have. False: nobody has to go.
bool Planner::name_victims(int32_t senior_count) {
  const int32_t sum = must_have(senior_count);
  given_.clear();
  if (sum <= available_) return false;
  std::vector<Loss> losses;
  for (const Sequence* sequence : s_.running_) {
    if (sequence != s_.senior_) losses.push_back(loss(*sequence));
  }
  std::sort(losses.begin(), losses.end(), [](const Loss& a, const Loss& b) {
    if (a.sequence->priority != b.sequence->priority) return a.sequence->priority < b.sequence->priority;
    if (a.positions != b.positions) return a.positions < b.positions;
    return a.sequence->ordinal != b.sequence->ordinal ? a.sequence->ordinal > b.sequence->ordinal
                                                      : a.sequence->ticket > b.sequence->ticket;
  });
  int32_t available = available_;
  for (const Loss& loss : losses) {
    plan_.victims.push_back(loss.sequence->id);
    for (const BlockId block : loss.sequence->table) {
      if (owners(block) == 1) {
        ++available;
      } else {
        given_.push_back(block);
      }
    }
    const size_t kept = given_.size();
    const bool enough = must_have(senior_count) <= available;
    given_.resize(kept);
    if (enough) break;
  }
  given_.clear();
  return true;
}

// The senior gets on by so many positions, whatever the others do: c in the bound of scheduler.h.
int32_t Planner::senior_least() const {
  return std::min({s_.senior_->pending(), BatchController::kLeastPrompt, s_.config_.step_tokens - limit_ + 1});
}

void Planner::decodes() {
  const auto decode = [&](const Sequence& sequence) {
    take(sequence, 1);
    add_chunk(sequence, sequence.length, 1);
  };
  const bool senior_decodes = s_.senior_->pending() == 1;
  if (senior_decodes) decode(*s_.senior_);
  const int32_t limit = limit_ - (senior_decodes ? 0 : 1);
  for (const Sequence* sequence : s_.running_) {
    if (selected_ >= limit) break;
    if (sequence != s_.senior_ && sequence->pending() == 1) decode(*sequence);
  }
}

void Planner::prompts() {
  const auto prompt = [&](const Sequence& sequence) {
    const int32_t count = fit(sequence, std::min(sequence.pending(), prompt_budget_));
    if (count > 0) {
      take(sequence, count);
      add_chunk(sequence, sequence.length, count);
      prompt_budget_ -= count;
    }
    promised_ += blocks(static_cast<int64_t>(sequence.tokens.size())) -
                 std::max(static_cast<int32_t>(sequence.table.size()), blocks(int64_t{sequence.length} + count));
  };
  if (s_.senior_->pending() > 1) prompt(*s_.senior_);
  for (const Sequence* sequence : s_.running_) {
    if (selected_ >= limit_) break;
    if (sequence != s_.senior_ && sequence->pending() > 1) prompt(*sequence);
  }
}

// Blocks to keep free for the growth of a running sequence.
int32_t Planner::growth(const Sequence& sequence) const {
  const int32_t most = blocks(sequence.max_total) - blocks(static_cast<int64_t>(sequence.tokens.size()));
  return std::min(most, static_cast<int32_t>(std::ceil(s_.headroom_)));
}

void Planner::starts() {
  int32_t running = static_cast<int32_t>(s_.running_.size());
  if (running >= limit_ || selected_ >= limit_ || prompt_budget_ <= 0 || s_.queue_.size() == 0) return;
  int32_t headroom = 0;
  for (const Sequence* sequence : s_.running_) headroom += growth(*sequence);
  FairQueue::Cursor cursor(s_.queue_);
  std::vector<BlockId> hits;
  while (running < limit_ && selected_ < limit_ && prompt_budget_ > 0) {
    const Sequence* sequence = cursor.head();
    if (sequence == nullptr) return;
    hits.clear();
    s_.pool_.find_prefix(sequence->cache_key, sequence->hashes.data(), sequence->tokens.data(),
                         s_.cacheable_blocks(*sequence), &hits);
    // A cached block that is taken into use is one that can't be allocated any more.
    int32_t taken = 0;
    for (const BlockId block : hits) taken += s_.pool_.owners(block) == 0;
    const int32_t found = static_cast<int32_t>(hits.size());
    const int32_t tokens = static_cast<int32_t>(sequence->tokens.size());
    const int32_t whole = blocks(tokens) - found;
    headroom += growth(*sequence);
    if (taken + whole + promised_ + (running > 0 ? headroom : 0) > available_) return;  // and nobody passes it
    const int32_t start = found * size_;
    const int32_t count = std::min(tokens - start, prompt_budget_);
    const int32_t now = blocks(int64_t{start} + count) - found;
    available_ -= taken + now;
    promised_ += whole - now;
    prompt_budget_ -= count;
    plan_.starts.push_back({sequence->id, found});
    add_chunk(*sequence, start, count);
    cursor.take(sequence->started ? 0 : tokens - start);
    ++running;
  }
}

// Proposals come last: they take rows and blocks that nobody else wants.
void Planner::drafts() {
  int32_t rows = std::min(s_.config_.step_tokens, s_.controller_.rows()) - plan_.rows;
  for (Chunk& chunk : plan_.chunks) {
    if (rows <= 0 || available_ < promised_) return;
    if (chunk.count != 1 || !chunk.samples) continue;
    const Sequence& sequence = s_.get(chunk.sequence);
    if (sequence.draft.empty() || sequence.state != Sequence::State::kRunning) continue;
    const int32_t room = sequence.max_total - static_cast<int32_t>(sequence.tokens.size()) - 1;
    int32_t count = std::min({static_cast<int32_t>(sequence.draft.size()), room, rows});
    const int32_t have = blocks(int64_t{sequence.length} + 1);
    const int64_t most = (static_cast<int64_t>(have) + available_ - promised_) * size_ - sequence.length - 1;
    count = static_cast<int32_t>(std::clamp<int64_t>(most, 0, std::max(count, 0)));
    available_ -= blocks(int64_t{sequence.length} + 1 + count) - have;
    chunk.count += count;
    chunk.drafts = count;
    plan_.rows += count;
    rows -= count;
  }
}

void Planner::continuous() {
  if (s_.senior_ != nullptr) {
    if (name_victims(senior_least())) return;
    decodes();
  }
  // Beyond the rows that the controller allows, a few prompt tokens are always taken, so that prompts get on.
  const int32_t left = s_.config_.step_tokens - plan_.rows;
  prompt_budget_ = std::min(left, std::max(s_.controller_.rows() - plan_.rows, BatchController::kLeastPrompt));
  if (s_.senior_ != nullptr) prompts();
  starts();
  drafts();
  plan_.slots = std::min(limit_, static_cast<int32_t>(s_.running_.size()) + s_.queue_.size());
}

void Planner::static_batch() {
  plan_.slots = std::min(limit_, static_cast<int32_t>(s_.running_.size()) + s_.queue_.size());
  int32_t budget = s_.config_.step_tokens;
  plan_.longest = s_.static_prompt_;
  const auto prompt = [&](const Sequence& sequence) {
    const int32_t pending = sequence.pending();
    const int32_t count = fit(sequence, std::min(pending, budget));
    if (count == 0) return;
    take(sequence, count);
    add_chunk(sequence, sequence.length, count);
    budget -= count;
    if (count == pending) plan_.padding += std::max(0, plan_.longest - static_cast<int32_t>(sequence.tokens.size()));
  };
  if (s_.senior_ == nullptr) {
    std::vector<const Sequence*> batch;
    FairQueue::Cursor cursor(s_.queue_);
    plan_.longest = 0;
    for (int32_t aside = 0; static_cast<int32_t>(batch.size()) < limit_;) {
      const Sequence* sequence = cursor.head();
      if (sequence == nullptr) break;
      aside += blocks(sequence->max_total);
      if (aside > available_) break;
      plan_.starts.push_back({sequence->id, 0});
      batch.push_back(sequence);
      plan_.longest = std::max(plan_.longest, static_cast<int32_t>(sequence->tokens.size()));
      cursor.take(sequence->started ? 0 : static_cast<int32_t>(sequence->tokens.size()));
    }
    for (const Sequence* sequence : batch) prompt(*sequence);
    return;
  }
  plan_.slots = std::max(plan_.slots, s_.static_slots_);
  if (name_victims(senior_least())) return;  // only forks can make blocks lack here
  if (s_.senior_->pending() > 1) prompt(*s_.senior_);
  for (const Sequence* sequence : s_.running_) {
    if (selected_ == limit_) break;
    if (sequence != s_.senior_ && sequence->pending() > 1) prompt(*sequence);
  }
  if (!plan_.chunks.empty()) return;
  decodes();
  plan_.padding = std::max(0, s_.static_slots_ - selected_);
}

void Scheduler::plan(StepPlan* plan) const {
  plan->chunks.clear();
  plan->starts.clear();
  plan->victims.clear();
  plan->rows = plan->padding = plan->slots = plan->longest = 0;
  plan->version = version_;
  if (idle()) return;
  Planner planner(*this, plan);
  if (config_.static_batching) {
    planner.static_batch();
  } else {
    planner.continuous();
  }
}

StepPlan Scheduler::plan() const {
  StepPlan made;
  plan(&made);
  return made;
}

}  // namespace edgec
