#include "scheduler.h"

#include <algorithm>
#include <cmath>

#include "status.h"

namespace edgec {
namespace {

constexpr double kMaxHeadroom = 16.0;  // blocks per running sequence
constexpr double kCalm = 0.99;         // per step without preemption: headroom halves in 69 steps

SchedulerConfig checked(const SchedulerConfig& config) {
  const auto positive = [](int32_t value, const char* message) {
    require(value >= 1, EDGEC_INVALID_ARGUMENT, message);
  };
  positive(config.context, "context must be at least 1");
  positive(config.max_batch, "max_batch must be at least 1");
  positive(config.max_waiting, "max_waiting must be at least 1");
  positive(config.aging_steps, "aging_steps must be at least 1");
  require(config.step_tokens >= config.max_batch, EDGEC_INVALID_ARGUMENT,
          "step_tokens must be at least max_batch: each sequence in a step has a row");
  require(config.step_slo >= 0.0, EDGEC_INVALID_ARGUMENT, "step_slo must not be negative");
  return config;
}

// Results mostly come in the order of the chunks, so the search begins behind the one found last.
const StepResult* find_result(const StepResult* results, size_t count, SequenceId id, size_t* next) {
  for (size_t i = 0; i < count; ++i) {
    const size_t at = (*next + i) % count;
    if (results[at].sequence != id) continue;
    *next = at + 1;
    return &results[at];
  }
  return nullptr;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(checked(config)),
      pool_(config.blocks, config.block_size, config.first_block, config.hash),
      queue_(config.aging_steps),
      controller_(config.max_batch, config.step_tokens, config.step_slo) {}

// ---- Sequences ------------------------------------------------------------------------------------------------------

Admission Scheduler::add(const SequenceSpec& spec) {
  const bool valid = !spec.prompt.empty() && spec.priority >= kMinPriority && spec.priority <= kMaxPriority &&
                     spec.max_new_tokens >= 0 && std::isfinite(spec.weight) && spec.weight > 0.0 &&
                     sequences_.count(spec.id) == 0 &&
                     std::all_of(spec.prompt.begin(), spec.prompt.end(), [](int32_t token) { return token >= 0; });
  if (!valid) return Admission::kInvalid;
  const int64_t capacity = std::min<int64_t>(config_.context, int64_t{config_.blocks} * config_.block_size);
  const int64_t prompt = static_cast<int64_t>(spec.prompt.size());
  if (prompt + 1 > capacity) return Admission::kTooLong;
  if (queue_.size() >= config_.max_waiting) return Admission::kQueueFull;
  auto sequence = std::make_unique<Sequence>();
  sequence->id = spec.id;
  sequence->compute_all = spec.compute_all;
  sequence->priority = spec.priority;
  sequence->prompt = static_cast<int32_t>(prompt);
  sequence->max_total =
      static_cast<int32_t>(spec.max_new_tokens == 0 ? capacity : std::min(capacity, prompt + spec.max_new_tokens));
  sequence->tenant = queue_.join(spec.tenant, spec.weight);
  sequence->ticket = next_ticket_++;
  sequence->rank = queue_.rank(spec.priority, stats_.steps);
  sequence->arrival_step = stats_.steps;
  sequence->cache_key = spec.cache_key;
  sequence->tokens = spec.prompt;
  hash_full_blocks(sequence.get());
  queue_.push(sequence.get());
  sequences_.emplace(spec.id, std::move(sequence));
  return Admission::kAccepted;
}

bool Scheduler::cancel(SequenceId id) { return remove(id, &stats_.cancelled); }
bool Scheduler::finish(SequenceId id) { return remove(id, &stats_.finished); }

bool Scheduler::remove(SequenceId id, uint64_t* counter) {
  Sequence* sequence = lookup(id);
  if (sequence == nullptr) return false;
  leave(sequence);
  ++*counter;
  changed();
  return true;
}

bool Scheduler::fork(SequenceId parent_id, SequenceId child_id, const int32_t* last_token) {
  Sequence* parent = lookup(parent_id);
  if (parent == nullptr || parent->in_flight || lookup(child_id) != nullptr) return false;
  // The last token can only be changed while its keys and values are not there yet: they never are.
  auto child = std::make_unique<Sequence>(*parent);
  child->id = child_id;
  child->ticket = next_ticket_++;
  child->draft.clear();
  if (last_token != nullptr) {
    child->tokens.back() = *last_token;
    while (child->hashes.size() * config_.block_size >= child->tokens.size()) child->hashes.pop_back();
    hash_full_blocks(child.get());
  }
  for (const BlockId block : child->table) pool_.retain(block);
  if (child->state == Sequence::State::kRunning) {
    ++child->tenant->running;
    running_.insert(std::find(running_.begin(), running_.end(), parent) + 1, child.get());
  } else {
    queue_.push(child.get());
  }
  sequences_.emplace(child_id, std::move(child));
  changed();
  return true;
}

bool Scheduler::preempt(SequenceId id) {
  Sequence* sequence = lookup(id);
  if (sequence == nullptr || sequence->state != Sequence::State::kRunning) return false;
  to_waiting(sequence);
  ++stats_.preemptions;
  changed();
  return true;
}

int32_t Scheduler::preempt_all_but_one() {
  const Sequence* keep = nullptr;
  for (const Sequence* sequence : running_) {
    if (keep == nullptr || sequence->length > keep->length) keep = sequence;
  }
  int32_t count = 0;
  for (size_t i = running_.size(); i-- > 0;) {
    if (running_[i] != keep) count += preempt(running_[i]->id);
  }
  return count;
}

void Scheduler::trim() {
  pool_.trim();
  changed();
}

void Scheduler::set_draft(SequenceId id, const int32_t* tokens, int32_t count) {
  Sequence* sequence = lookup(id);
  require(sequence != nullptr, EDGEC_NOT_FOUND, "no such sequence");
  sequence->draft.assign(tokens, tokens + count);
  ++version_;
}

// ---- A step ---------------------------------------------------------------------------------------------------------

StepOutcome Scheduler::reserve(const StepPlan& plan, std::vector<BlockCopy>* copies) {
  require(!in_flight_, EDGEC_INTERNAL, "a step is reserved already");
  copies->clear();
  if (plan.version != version_) {
    ++stats_.retries;
    return StepOutcome::kRetry;
  }
  if (plan.empty()) return idle() ? StepOutcome::kIdle : StepOutcome::kDeferred;
  if (!plan.victims.empty()) {
    for (const SequenceId id : plan.victims) preempt(id);
    headroom_ = std::min(2.0 * headroom_, kMaxHeadroom);
    ++stats_.retries;
    return StepOutcome::kRetry;
  }
  // Prefixes first: an allocation must not evict what the plan counts on.
  bool reserved = true;
  for (const Start& start : plan.starts) reserved = reserved && this->start(start);
  for (const Chunk& chunk : plan.chunks) reserved = reserved && reserve_chunk(chunk, copies);
  if (!reserved) {  // the plan was not this scheduler's, or is damaged: `plan` counts blocks exactly
    rollback(plan);
    changed();
    ++stats_.retries;
    return StepOutcome::kRetry;
  }
  in_flight_ = true;
  return StepOutcome::kCommitted;
}

bool Scheduler::start(const Start& start) {
  Sequence* sequence = lookup(start.sequence);
  if (sequence == nullptr || sequence->state != Sequence::State::kWaiting) return false;
  pool_.find_prefix(sequence->cache_key, sequence->hashes.data(), sequence->tokens.data(), start.blocks,
                    &sequence->table);
  for (const BlockId block : sequence->table) pool_.retain(block);
  queue_.remove(sequence);
  if (!sequence->started) sequence->ordinal = next_ordinal_++;
  sequence->state = Sequence::State::kRunning;
  sequence->in_flight = true;
  sequence->published = static_cast<int32_t>(sequence->table.size());
  sequence->serial = sequence->table.empty() ? 0 : pool_.serial(sequence->table.back());
  sequence->length = sequence->published * config_.block_size;
  ++sequence->tenant->running;
  insert_running(sequence);
  return sequence->published == start.blocks;
}

bool Scheduler::reserve_chunk(const Chunk& chunk, std::vector<BlockCopy>* copies) {
  Sequence* sequence = lookup(chunk.sequence);
  if (sequence == nullptr || sequence->state != Sequence::State::kRunning || sequence->length != chunk.start) {
    return false;
  }
  sequence->in_flight = true;
  const int32_t size = config_.block_size;
  if (sequence->length % size != 0) {
    const int32_t place = sequence->length / size;
    const BlockId block = sequence->table[place];
    const std::optional<BlockId> own = pool_.make_writable(block);
    if (!own) return false;
    if (*own != block) {
      copies->push_back({block, *own});
      sequence->table[place] = *own;
      sequence->shared = block;
      sequence->shared_at = place;
    }
  }
  while (static_cast<int64_t>(sequence->table.size()) * size < int64_t{chunk.start} + chunk.count) {
    const std::optional<BlockId> block = pool_.allocate();
    if (!block) return false;
    sequence->table.push_back(*block);
    ++sequence->appended;
  }
  return true;
}

void Scheduler::undo_chunk(Sequence* sequence) {
  for (; sequence->appended > 0; --sequence->appended) {
    pool_.release(sequence->table.back());
    sequence->table.pop_back();
  }
  if (sequence->shared == kNoBlock) return;
  pool_.release(sequence->table[sequence->shared_at]);
  if (pool_.is_free(sequence->shared)) {
    // Its other owners were cancelled in between: these positions are gone, and will be computed again.
    sequence->table.pop_back();
    sequence->length = sequence->shared_at * config_.block_size;
  } else {
    pool_.retain(sequence->shared);
    sequence->table[sequence->shared_at] = sequence->shared;
  }
  sequence->shared = kNoBlock;
}

void Scheduler::undo_start(Sequence* sequence) {
  if (!sequence->started) next_ordinal_ = std::min(next_ordinal_, sequence->ordinal);
  to_waiting(sequence);
}

void Scheduler::rollback(const StepPlan& plan) {
  for (size_t i = plan.chunks.size(); i-- > 0;) {
    Sequence* sequence = lookup(plan.chunks[i].sequence);
    if (sequence != nullptr && sequence->in_flight) undo_chunk(sequence);
  }
  for (size_t i = plan.starts.size(); i-- > 0;) {
    Sequence* sequence = lookup(plan.starts[i].sequence);
    if (sequence != nullptr && sequence->in_flight) undo_start(sequence);
  }
  for (const Chunk& chunk : plan.chunks) {
    if (Sequence* sequence = lookup(chunk.sequence)) sequence->in_flight = false;
  }
}

void Scheduler::release(const StepPlan& plan) {
  require(in_flight_, EDGEC_INTERNAL, "no step is reserved");
  in_flight_ = false;
  rollback(plan);
  ++stats_.releases;
  changed();
}

void Scheduler::check(const StepPlan& plan, const StepResult* results, size_t count) const {
  require(in_flight_, EDGEC_INTERNAL, "no step is reserved");
  size_t next = 0;
  for (const Chunk& chunk : plan.chunks) {
    const Sequence* sequence = find(chunk.sequence);
    if (!chunk.samples || sequence == nullptr || !sequence->in_flight) continue;
    const StepResult* result = find_result(results, count, chunk.sequence, &next);
    require(result != nullptr, EDGEC_INTERNAL, "a sampled sequence has no result");
    require(result->count > 0 || result->finish, EDGEC_INTERNAL, "a result without a token must finish its sequence");
    require(result->count >= 0 && result->count <= chunk.drafts + 1 && result->count <= room(chunk.sequence),
            EDGEC_INTERNAL, "a result has more tokens than were asked for, or than there is room for");
  }
}

void Scheduler::commit(const StepPlan& plan, const StepResult* results, size_t count, double seconds) {
  check(plan, results, count);
  in_flight_ = false;
  for (const Start& start : plan.starts) {
    Sequence* sequence = lookup(start.sequence);
    if (sequence == nullptr || !sequence->in_flight) continue;
    if (!sequence->started) {
      sequence->started = true;
      sequence->cached_tokens = start.blocks * config_.block_size;
      stats_.prompt_tokens += static_cast<uint64_t>(sequence->prompt);
      stats_.cached_tokens += static_cast<uint64_t>(sequence->cached_tokens);
      const uint64_t waited = stats_.steps - sequence->arrival_step;
      stats_.wait_steps += waited;
      stats_.max_wait_steps = std::max(stats_.max_wait_steps, waited);
      queue_.started(sequence->tenant);
      queue_.charge(sequence->tenant, sequence->prompt - sequence->cached_tokens);
    }
  }
  size_t next = 0;
  for (const Chunk& chunk : plan.chunks) {
    Sequence* sequence = lookup(chunk.sequence);
    if (sequence == nullptr || !sequence->in_flight) continue;
    apply(chunk, chunk.samples ? find_result(results, count, chunk.sequence, &next) : nullptr, sequence);
  }
  for (const Start& start : plan.starts) {  // a static batch starts members that have no chunk yet
    if (Sequence* sequence = lookup(start.sequence)) sequence->in_flight = false;
  }
  account(plan, seconds);
  changed();
}

void Scheduler::apply(const Chunk& chunk, const StepResult* result, Sequence* sequence) {
  const int32_t size = config_.block_size;
  const int32_t accepted = result != nullptr && chunk.drafts > 0 ? std::max(0, result->count - 1) : 0;
  const int32_t kept = chunk.count - chunk.drafts + accepted;
  stats_.computed_tokens += static_cast<uint64_t>(chunk.count);
  stats_.recomputed_tokens +=
      static_cast<uint64_t>(std::clamp(sequence->high_water - chunk.start, 0, chunk.count - chunk.drafts));
  stats_.rejected_tokens += static_cast<uint64_t>(chunk.drafts - accepted);
  sequence->in_flight = false;
  sequence->appended = 0;
  sequence->shared = kNoBlock;
  sequence->length = chunk.start + kept;
  sequence->high_water = std::max(sequence->high_water, sequence->length);
  if (result != nullptr && result->count > 0) {
    sequence->tokens.insert(sequence->tokens.end(), result->tokens, result->tokens + result->count);
    sequence->draft.clear();
    stats_.answer_tokens += static_cast<uint64_t>(result->count);
    queue_.charge(sequence->tenant, result->count);
  }
  while ((static_cast<int64_t>(sequence->table.size()) - 1) * size >= sequence->length) {  // of rejected drafts
    pool_.release(sequence->table.back());
    sequence->table.pop_back();
  }
  for (int32_t place = chunk.start / size; place < static_cast<int32_t>(sequence->table.size()); ++place) {
    pool_.set_filled(sequence->table[place], std::min(size, sequence->length - place * size));
  }
  hash_full_blocks(sequence);
  for (; config_.prefix_cache && int64_t{sequence->published + 1} * size <= sequence->length; ++sequence->published) {
    const int32_t place = sequence->published;
    sequence->table[place] = pool_.publish(sequence->table[place], sequence->serial, sequence->hashes[place],
                                           sequence->tokens.data() + static_cast<size_t>(place) * size,
                                           sequence->cache_key, &sequence->serial);
  }
  if (result != nullptr && result->finish) {
    leave(sequence);
    ++stats_.finished;
  }
}

void Scheduler::account(const StepPlan& plan, double seconds) {
  controller_.observe(seconds, static_cast<int32_t>(plan.chunks.size()), plan.rows);
  headroom_ = std::max(1.0, headroom_ * kCalm);
  ++stats_.steps;
  stats_.padding_rows += static_cast<uint64_t>(plan.padding);
  stats_.batch_slots += static_cast<uint64_t>(plan.slots);
  stats_.batch_used += plan.chunks.size();
  const PoolCounts counts = pool_.counts();
  stats_.kv_token_steps += static_cast<uint64_t>(counts.owned_tokens);
  stats_.kv_slot_steps += static_cast<uint64_t>(counts.owned) * static_cast<uint64_t>(config_.block_size);
  queue_.count_step();
  if (!config_.static_batching) return;
  if (!plan.starts.empty()) {
    static_slots_ = static_cast<int32_t>(plan.starts.size());
    static_prompt_ = plan.longest;
    static_blocks_ = 0;
    for (const Start& start : plan.starts) {
      const Sequence* sequence = find(start.sequence);
      if (sequence == nullptr) continue;
      static_blocks_ += (sequence->max_total + config_.block_size - 1) / config_.block_size;
    }
  }
  const int32_t aside = std::max(0, static_blocks_ - counts.owned);
  stats_.kv_slot_steps += static_cast<uint64_t>(aside) * static_cast<uint64_t>(config_.block_size);
  if (running_.empty()) static_slots_ = static_prompt_ = static_blocks_ = 0;
}

// ---- The parts of these ---------------------------------------------------------------------------------------------

void Scheduler::changed() {
  ++version_;
  choose_senior();
#ifndef NDEBUG
  const std::string wrong = verify();
  if (!wrong.empty()) throw Error(EDGEC_INTERNAL, wrong);
#endif
}

void Scheduler::choose_senior() {
  if (senior_ == nullptr && !running_.empty()) senior_ = running_.front();
}

void Scheduler::insert_running(Sequence* sequence) {
  const auto later = [](const Sequence* a, const Sequence* b) { return a->ordinal < b->ordinal; };
  running_.insert(std::upper_bound(running_.begin(), running_.end(), sequence, later), sequence);
}

void Scheduler::stop_running(Sequence* sequence) {
  if (senior_ == sequence) senior_ = nullptr;
  running_.erase(std::find(running_.begin(), running_.end(), sequence));
  --sequence->tenant->running;
}

void Scheduler::drop_blocks(Sequence* sequence) {
  // The tail first: what is cached from now on gives way in this order, and a prefix is useful without its tail only.
  for (size_t i = sequence->table.size(); i-- > 0;) pool_.release(sequence->table[i]);
  sequence->table.clear();
  sequence->length = sequence->published = sequence->appended = 0;
  sequence->serial = 0;
  sequence->shared = kNoBlock;
  sequence->in_flight = false;
}

void Scheduler::to_waiting(Sequence* sequence) {
  drop_blocks(sequence);
  stop_running(sequence);
  sequence->state = Sequence::State::kWaiting;
  queue_.push(sequence);
}

void Scheduler::leave(Sequence* sequence) {
  drop_blocks(sequence);
  if (sequence->state == Sequence::State::kRunning) {
    stop_running(sequence);
  } else {
    queue_.remove(sequence);
  }
  sequences_.erase(sequence->id);
}

void Scheduler::hash_full_blocks(Sequence* sequence) const {
  if (!config_.prefix_cache) return;
  const size_t size = static_cast<size_t>(config_.block_size);
  while ((sequence->hashes.size() + 1) * size <= sequence->tokens.size()) {
    const uint64_t previous = sequence->hashes.empty() ? pool_.root_hash(sequence->cache_key) : sequence->hashes.back();
    sequence->hashes.push_back(pool_.extend(previous, sequence->tokens.data() + sequence->hashes.size() * size));
  }
}

int32_t Scheduler::cacheable_blocks(const Sequence& sequence) const {
  if (!config_.prefix_cache) return 0;
  // The last token is always computed: its logits are wanted. And all that nobody has seen the logits of yet.
  int32_t tokens = static_cast<int32_t>(sequence.tokens.size()) - 1;
  if (sequence.compute_all) tokens = std::min(tokens, sequence.high_water);
  return tokens / config_.block_size;
}

// ---- Looking --------------------------------------------------------------------------------------------------------

const Sequence* Scheduler::find(SequenceId id) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

Sequence* Scheduler::lookup(SequenceId id) { return const_cast<Sequence*>(find(id)); }

const Sequence& Scheduler::get(SequenceId id) const {
  const Sequence* sequence = find(id);
  require(sequence != nullptr, EDGEC_NOT_FOUND, "no such sequence");
  return *sequence;
}

int32_t Scheduler::token_at(SequenceId id, int32_t position) const {
  const Sequence& sequence = get(id);
  const size_t at = static_cast<size_t>(position), own = sequence.tokens.size();
  require(position >= 0 && at < own + sequence.draft.size(), EDGEC_INTERNAL, "no token at this position");
  return at < own ? sequence.tokens[at] : sequence.draft[at - own];
}

int32_t Scheduler::room(SequenceId id) const {
  const Sequence& sequence = get(id);
  return sequence.max_total - static_cast<int32_t>(sequence.tokens.size());
}

int32_t Scheduler::batch_limit() const { return controller_.batch(); }

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = stats_;
  stats.waiting = queue_.size();
  stats.running = static_cast<int32_t>(running_.size());
  stats.batch_limit = batch_limit();
  return stats;
}

std::string Scheduler::verify() const {
  std::string wrong = pool_.verify();
  if (!wrong.empty()) return wrong;
  std::vector<int32_t> owners(static_cast<size_t>(config_.blocks), 0);
  size_t running = 0, waiting = 0;
  for (const auto& [id, sequence] : sequences_) {
    for (const BlockId block : sequence->table) ++owners[static_cast<size_t>(block - config_.first_block)];
    const int32_t tokens = static_cast<int32_t>(sequence->tokens.size());
    if (sequence->id != id || tokens > sequence->max_total) return "a sequence is not what it is kept as, or too long";
    if (sequence->hashes.size() > sequence->tokens.size() / static_cast<size_t>(config_.block_size)) {
      return "a block was hashed before it was full";
    }
    if (sequence->state == Sequence::State::kWaiting) {
      ++waiting;
      if (!sequence->table.empty() || sequence->length != 0) return "a waiting sequence holds blocks";
      if (sequence->tenant->waiting.count(sequence.get()) == 0) return "a waiting sequence is not in the queue";
      continue;
    }
    ++running;
    if (std::find(running_.begin(), running_.end(), sequence.get()) == running_.end()) return "a running one is lost";
    if (sequence->pending() < 1) return "a running sequence has nothing to compute";
    if (sequence->published * config_.block_size > sequence->length) return "a block was published before it was full";
    const int32_t needed = (sequence->length + config_.block_size - 1) / config_.block_size;
    if (static_cast<int32_t>(sequence->table.size()) != needed + sequence->appended) return "a table has a wrong size";
  }
  if (running != running_.size() || waiting != static_cast<size_t>(queue_.size())) return "the counts are wrong";
  if ((senior_ == nullptr) != running_.empty()) return "there is no senior, or one too many";
  for (int32_t i = 0; i < config_.blocks; ++i) {
    if (owners[static_cast<size_t>(i)] != pool_.owners(i + config_.first_block)) return "owners and tables don't fit";
  }
  int32_t tenant_running = 0;
  for (const auto& [id, tenant] : queue_.tenants()) tenant_running += tenant.running;
  return tenant_running == static_cast<int32_t>(running) ? "" : "the tenants' counts are wrong";
}

}  // namespace edgec
