// Opening an engine, its requests and its events. The step is in engine_step.cpp, what is decided before the first one
// in engine_config.cpp.
#include "engine.h"

#include <algorithm>
#include <cmath>

#include "status.h"

namespace edgec {
namespace {

// A seed for requests that bring none: SplitMix64 of their id.
uint64_t seed_of(uint64_t id) {
  uint64_t z = id * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

Engine::Engine(const std::string& folder, const edgec_engine_options& options)
    : manifest_(Manifest::load(folder)),
      config_(EngineConfig::resolve(options, manifest_)),
      kernels_(pick_kernels(config_.kernel.c_str())) {
  Safetensors file(folder + "/model.safetensors");
  if (file.bytes() != manifest_.model_bytes)
    throw Error(EDGEC_CORRUPT, folder + "/model.safetensors has " + std::to_string(file.bytes()) +
                                   " bytes, the manifest says " + std::to_string(manifest_.model_bytes) +
                                   "; the bundle is incomplete");
  budget_ = make_budget(file);
  tokenizer_.reset(new edgec_tokenizer{Tokenizer::from_file(folder + "/tokenizer.json")});
  threads_.reset(new ThreadPool(config_.threads));
  weights_.reset(new Weights(manifest_, file, kernels_, *threads_));

  SchedulerConfig s;
  s.first_block = config_.static_batching ? (config_.step_tokens - 1) / config_.block_size + 1 : 1;
  s.blocks = budget_.blocks;
  s.block_size = config_.block_size;
  s.context = config_.context;
  s.max_batch = config_.max_batch;
  s.step_tokens = config_.step_tokens;
  s.max_waiting = config_.max_waiting;
  s.aging_steps = config_.aging_steps;
  s.static_batching = config_.static_batching;
  s.prefix_cache = config_.prefix_cache;
  s.step_slo = config_.step_slo;
  scheduler_.reset(new Scheduler(s));
  const KvLayout kv = {config_.kv, config_.block_size, manifest_.model.kv_heads, manifest_.model.head_dim};
  store_.reset(new KvStore(kv, manifest_.model.layers, s.first_block + s.blocks));
  decoder_.reset(new Decoder(manifest_.model, *weights_, kernels_, *threads_, *store_, config_.context,
                             config_.step_tokens, config_.max_batch < 16 ? 16 : config_.max_batch));
  if (config_.head_drafts) {
    head_.reset(new DraftHead(manifest_, *weights_, kernels_, *threads_, config_.draft_rows()));
    threads_->name_ahead(weights_->draft_data(), weights_->draft_size());
  }
  control_ = DraftControl(config_.draft_length);
  samplers_.resize(threads_->threads());
  row_copies_.resize(threads_->threads());
  scratch_table_.assign((config_.context + config_.block_size - 1) / config_.block_size, 0);
  description_ = make_description();
  log(EDGEC_LOG_INFO, "engine: " + description_);
}

void Engine::log(int32_t level, const std::string& line) const {
  if (config_.log != nullptr) config_.log(config_.user, level, line.c_str());
}

// ---- Requests

uint64_t Engine::submit(const edgec_request& given) {
  if (given.struct_size != sizeof(edgec_request))
    throw Error(EDGEC_VERSION_MISMATCH,
                "edgec_request has another size in this library; compile against its own edgec.h");
  const int32_t vocab = manifest_.model.vocab_size;
  require(given.tokens != nullptr && given.token_count > 0, EDGEC_INVALID_ARGUMENT, "the prompt has no tokens");
  for (int32_t i = 0; i < given.token_count; ++i)
    if (given.tokens[i] < 0 || given.tokens[i] >= vocab)
      throw Error(EDGEC_INVALID_ARGUMENT, "token " + std::to_string(given.tokens[i]) +
                                              " of the prompt is not in the vocabulary of " + std::to_string(vocab));
  require(given.priority >= kMinPriority && given.priority <= kMaxPriority, EDGEC_INVALID_ARGUMENT,
          "priority must be in -8…7");
  require(std::isfinite(given.tenant_weight) && given.tenant_weight >= 0.0f, EDGEC_INVALID_ARGUMENT,
          "tenant_weight must be positive");
  std::unique_ptr<Request> request(new Request());
  request->params = sampling_params(given.sampling, vocab);
  if (request->params.n > config_.max_batch)
    throw Error(EDGEC_INVALID_ARGUMENT, "n is " + std::to_string(request->params.n) + ", and max_batch is " +
                                            std::to_string(config_.max_batch));
  request->prompt.assign(given.tokens, given.tokens + given.token_count);
  request->score_prompt = given.score_prompt != 0;
  const auto stop = std::make_shared<const StopStrings>(request->params.stop);
  for (int i = 0; i < request->params.n; ++i) {
    request->answers.emplace_back(new Answer(request.get(), i, tokenizer_->tokenizer, stop));
    if (request->params.has_penalties()) request->answers.back()->history.add_prompt(given.tokens, given.token_count);
  }
  request->unfinished = request->params.n;

  SequenceSpec spec;
  spec.prompt = request->prompt;
  spec.priority = given.priority;
  spec.tenant = given.tenant;
  spec.weight = given.tenant_weight == 0.0f ? 1.0 : static_cast<double>(given.tenant_weight);
  spec.max_new_tokens = request->params.max_tokens;
  spec.cache_key = PrefixKey().add("salt", given.cache_salt).bytes();
  spec.compute_all = request->score_prompt;

  std::lock_guard<std::mutex> lock(mutex_);
  request->id = next_id_;
  request->seed = request->params.has_seed ? request->params.seed : seed_of(request->id);
  spec.id = request->answers.front()->id();
  switch (scheduler_->add(spec)) {
    case Admission::kAccepted:
      break;
    case Admission::kQueueFull:
      throw Error(EDGEC_QUEUE_FULL, std::to_string(config_.max_waiting) + " requests wait already");
    case Admission::kTooLong:
      throw Error(EDGEC_TOO_LONG, "a prompt of " + std::to_string(given.token_count) +
                                      " tokens leaves no room for an answer in a context of " +
                                      std::to_string(config_.context));
    case Admission::kInvalid:
      throw Error(EDGEC_INVALID_ARGUMENT, "the scheduler refuses the request");
  }
  next_id_ += 1;
  const uint64_t id = request->id;
  requests_.emplace(id, std::move(request));
  return id;
}

void Engine::cancel(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = requests_.find(id);
  if (found == requests_.end() || found->second->unfinished == 0)
    throw Error(EDGEC_NOT_FOUND, "request " + std::to_string(id) + " is not known, or has ended");
  end_all(found->second.get(), EDGEC_FINISH_CANCELLED);
  if (!stepping_) sweep();
}

Answer* Engine::find(SequenceId id) {
  const auto found = requests_.find(id >> kSequenceBits);
  return found == requests_.end() ? nullptr : found->second->answers[id & ((1u << kSequenceBits) - 1)].get();
}

// The answer's last event. Its request is forgotten at the end of the step, because the step may still look at it.
void Engine::end(Answer* answer, int32_t finish) {
  answer->finished = true;
  events_.push_back(finish_event(answer, finish));
  if (--answer->request->unfinished == 0) ended_.push_back(answer->request->id);
}

void Engine::sweep() {
  for (const uint64_t id : ended_) requests_.erase(id);
  ended_.clear();
}

// ---- Events, numbers, memory

int32_t Engine::poll(edgec_event* events, int32_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  polled_.clear();
  while (!events_.empty() && static_cast<int32_t>(polled_.size()) < capacity) {
    polled_.push_back(std::move(events_.front()));
    events_.pop_front();
  }
  for (size_t i = 0; i < polled_.size(); ++i) {  // now that they don't move any more
    Event& event = polled_[i];
    event.abi.text = event.text.c_str();
    event.abi.text_bytes = static_cast<int32_t>(event.text.size());
    event.abi.top = event.top.empty() ? nullptr : event.top.data();
    event.abi.top_count = static_cast<int32_t>(event.top.size());
    events[i] = event.abi;
  }
  return static_cast<int32_t>(polled_.size());
}

void Engine::trim(int32_t level) {
  const Stepping stepping(stepping_);  // pages can't go while a step writes to them
  require(level >= EDGEC_TRIM_CACHE && level <= EDGEC_TRIM_CRITICAL, EDGEC_INVALID_ARGUMENT,
          "level must be EDGEC_TRIM_*");
  std::lock_guard<std::mutex> lock(mutex_);
  if (level >= EDGEC_TRIM_CRITICAL) scheduler_->preempt_all_but_one();
  scheduler_->trim();
  if (level < EDGEC_TRIM_IDLE) return;
  decoder_->discard_scratch();
  const BlockPool& pool = scheduler_->pool();
  const int32_t end = pool.first_block() + pool.total();
  for (int32_t first = pool.first_block(), next; first < end; first = next + 1) {
    for (next = first; next < end && pool.is_free(next);) ++next;
    if (next > first) store_->discard(first, next);
  }
}

edgec_stats Engine::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const SchedulerStats s = scheduler_->stats();
  const PoolCounts pool = scheduler_->pool().counts();
  edgec_stats out = {};
  out.struct_size = sizeof(out);
  out.waiting = s.waiting;
  out.running = s.running;
  out.blocks_total = pool.total;
  out.blocks_free = pool.free;
  out.blocks_cached = pool.cached;
  out.blocks_owned = pool.owned;
  out.batch_limit = s.batch_limit;
  out.kv_tokens = static_cast<int32_t>(pool.owned_tokens);
  out.steps = s.steps;
  out.retries = s.retries;
  out.failures = failures_;
  out.preemptions = s.preemptions;
  out.requests_finished = s.finished;
  out.requests_cancelled = s.cancelled;
  out.prompt_tokens = s.prompt_tokens;
  out.cached_tokens = s.cached_tokens;
  out.answer_tokens = s.answer_tokens;
  out.computed_tokens = s.computed_tokens;
  out.recomputed_tokens = s.recomputed_tokens;
  out.batch_slots = s.batch_slots;
  out.batch_used = s.batch_used;
  out.step_seconds = step_seconds_;
  out.forward_seconds = forward_seconds_;
  out.sample_seconds = sample_seconds_;
  out.kv_token_steps = s.kv_token_steps;
  out.kv_slot_steps = s.kv_slot_steps;
  for (int i = 0; i < kMostDrafts; ++i) {
    out.draft_reached[i] = draft_reached_[i];
    out.draft_kept[i] = draft_kept_[i];
  }
  out.drafted_tokens = drafted_tokens_;
  out.draft_places = draft_places_;
  out.draft_runs = draft_runs_;
  out.draft_seconds = draft_seconds_;
  out.draft_length = control_.latest();
  if (!recent_.empty()) {
    std::vector<double> sorted = recent_;
    std::sort(sorted.begin(), sorted.end());
    out.step_p50_ms = 1e3 * sorted[sorted.size() / 2];
    out.step_p99_ms = 1e3 * sorted[(sorted.size() * 99) / 100];
  }
  return out;
}

}  // namespace edgec
