#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "status.h"

namespace edgec {
namespace {

constexpr size_t kRecentSteps = 256;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A seed for requests that bring none: SplitMix64 of their id.
uint64_t seed_of(uint64_t id) {
  uint64_t z = id * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Clears a flag when the scope ends.
struct Stepping {
  std::atomic<bool>& flag;
  explicit Stepping(std::atomic<bool>& f) : flag(f) {
    if (flag.exchange(true))
      throw Error(EDGEC_BUSY, "the engine is in a step already: one thread at a time may call it");
  }
  ~Stepping() { flag.store(false); }
};

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
  weights_.reset(new Weights(manifest_.model, file, kernels_, *threads_));

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
  samplers_.resize(threads_->threads());
  row_copies_.resize(threads_->threads());
  for (int32_t i = 0; i < s.first_block; ++i) scratch_tables_.push_back(i);
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

// ---- A step

StepOutcome Engine::step() {
  const Stepping stepping(stepping_);
  const double start = now();
  const StepOutcome outcome = run_step();
  if (outcome == StepOutcome::kCommitted) rest(now() - start);
  return outcome;
}

StepOutcome Engine::run_step() {
  const double start = now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    sweep();
    scheduler_->plan(&plan_);
    if (plan_.empty()) return scheduler_->waiting_count() > 0 ? StepOutcome::kDeferred : StepOutcome::kIdle;
    copies_.clear();
    const StepOutcome reserved = scheduler_->reserve(plan_, &copies_);
    if (reserved != StepOutcome::kCommitted) return reserved;
    build_batch();
  }
  try {
    for (const BlockCopy& copy : copies_) store_->copy(copy.from, copy.to);
    compute();
  } catch (const std::exception& error) {
    log(EDGEC_LOG_ERROR, std::string("the step was rolled back: ") + error.what());
    std::lock_guard<std::mutex> lock(mutex_);
    fail_step();
    return StepOutcome::kFailed;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  commit(now() - start);
#ifndef NDEBUG
  const std::string broken = scheduler_->verify();
  if (!broken.empty()) throw Error(EDGEC_INTERNAL, "after the step: " + broken);
#endif
  return StepOutcome::kCommitted;
}

void Engine::build_batch() {
  batch_.rows.clear();
  batch_.tables.clear();
  tables_.clear();
  work_.clear();
  uses_.clear();
  for (const Start& start : plan_.starts) {
    Request* request = find(start.sequence)->request;
    if (request->cached_tokens < 0) request->cached_tokens = start.blocks * config_.block_size;
  }
  for (const Chunk& chunk : plan_.chunks) {
    Answer* answer = find(chunk.sequence);
    Request* request = answer->request;
    const std::vector<int32_t>& tokens = scheduler_->tokens(chunk.sequence);
    const int32_t prompt = static_cast<int32_t>(request->prompt.size()), end = chunk.start + chunk.count;
    const int32_t table = static_cast<int32_t>(batch_.tables.size());
    tables_.push_back(scheduler_->block_table(chunk.sequence));  // a copy: `cancel` may forget the sequence meanwhile
    const int32_t* blocks = tables_.back().data();
    batch_.tables.push_back(blocks);
    for (int32_t p = chunk.start; p < end; ++p) {
      const bool scores = request->score_prompt && answer->index == 0 && p >= request->scored && p + 1 < prompt;
      const bool wanted = scores || (chunk.samples && p + 1 == end);
      const int32_t slot = blocks[p / config_.block_size] * config_.block_size + p % config_.block_size;
      batch_.rows.push_back({tokens[p], p, slot, table, wanted});
      if (wanted) uses_.push_back({work_.size(), p, scores, 0.0f, {}});
    }
    work_.push_back({chunk, answer, {}});
    if (chunk.samples) work_.back().sampled.resize(request->forked ? 1 : request->params.n);
  }
  if (plan_.padding > 0) {  // static batching: rows that are computed for nothing
    const int32_t room =
        std::min(decoder_->max_rows() - static_cast<int32_t>(batch_.rows.size()),
                 std::min(config_.context, static_cast<int32_t>(scratch_tables_.size()) * config_.block_size));
    const int32_t table = static_cast<int32_t>(batch_.tables.size());
    batch_.tables.push_back(scratch_tables_.data());
    for (int32_t p = 0; p < std::min(plan_.padding, room); ++p)
      batch_.rows.push_back({0, p, p, table, true});  // scratch block i is block i
  }
}

// The model and the sampling, without the lock: `submit` and `cancel` leave what is read here as it is (requests are
// forgotten between steps only, and block tables are copies).
void Engine::compute() {
  const double start = now();
  decoder_->forward(batch_);
  int wanted = 0;
  for (const Batch::Row& row : batch_.rows) wanted += row.wanted ? 1 : 0;
  double sampling = 0;
  for (int first = 0; first < wanted; first += decoder_->max_wanted()) {
    const int count = std::min(wanted - first, decoder_->max_wanted());
    decoder_->project(first, count);
    const double projected = now();
    const int used = std::min(count, static_cast<int>(uses_.size()) - first);
    if (used > 0)
      threads_->run(used, [&](int i, int thread) { use_row(&uses_[first + i], decoder_->logits(i), thread); });
    sampling += now() - projected;
  }
  sample_seconds_ += sampling;
  forward_seconds_ += now() - start - sampling;
}

void Engine::use_row(Use* use, float* logits, int thread) {
  const int32_t vocab = manifest_.model.vocab_size;
  Work& work = work_[use->work];
  const Request& request = *work.answer->request;
  Sampler& sampler = samplers_[thread];
  if (use->scores) {
    use->logprob = Sampler::logprob(logits, vocab, request.prompt[use->position + 1]);
    if (request.params.logprobs > 0) {
      SamplingParams alternatives;
      alternatives.temperature = 0.0f;
      alternatives.logprobs = request.params.logprobs;
      use->top = sampler.sample(logits, vocab, alternatives, nullptr, 0, 0, 0).top;
    }
    return;
  }
  const uint32_t position = static_cast<uint32_t>(use->position + 1);
  if (work.sampled.size() == 1) {
    const Answer& answer = *work.answer;
    work.sampled[0] = sampler.sample(logits, vocab, request.params, &answer.history, request.seed,
                                     static_cast<uint32_t>(answer.index), position);
    return;
  }
  std::vector<float>& copy = row_copies_[thread];  // sampling overwrites its row
  for (size_t i = 0; i < work.sampled.size(); ++i) {
    copy.assign(logits, logits + vocab);
    work.sampled[i] = sampler.sample(copy.data(), vocab, request.params, &request.answers[i]->history, request.seed,
                                     static_cast<uint32_t>(i), position);
  }
}

void Engine::commit(double seconds) {
  for (Use& use : uses_) {
    Answer* answer = work_[use.work].answer;
    if (!use.scores || answer->finished) continue;
    Request* request = answer->request;
    for (int32_t p = use.position == 0 ? 0 : use.position + 1; p <= use.position + 1; ++p) {
      Event event = make_event(*answer, EDGEC_EVENT_PROMPT_SCORE);
      event.abi.token = request->prompt[p];
      event.abi.position = p;
      if (p > 0) {  // nothing comes before the first token, so it has no probability
        event.abi.logprob = use.logprob;
        event.top = std::move(use.top);
      }
      events_.push_back(std::move(event));
    }
    request->scored = use.position + 1;
  }

  results_.clear();
  said_.clear();
  for (Work& work : work_) {
    said_.push_back({});
    if (!work.chunk.samples || work.answer->finished) continue;
    const Sampled& sampled = work.sampled.front();
    if (sampled.outcome != SampleOutcome::kSampled) {
      results_.push_back({work.chunk.sequence, nullptr, 0, true});
      continue;
    }
    Said& said = said_.back();
    said = say(work.answer, sampled, work.chunk.start + work.chunk.count, scheduler_->room(work.chunk.sequence) - 1,
               manifest_.eos);
    const bool forks = work.sampled.size() > 1;  // the children need their parent a moment longer
    const bool finish = said.finish != EDGEC_FINISH_NONE && !forks;
    results_.push_back({work.chunk.sequence, &sampled.token, said.silent && finish ? 0 : 1, finish});
  }
  scheduler_->commit(plan_, results_.data(), results_.size(), seconds);

  for (size_t i = 0; i < work_.size(); ++i) {
    Work& work = work_[i];
    if (!work.chunk.samples || work.answer->finished) continue;
    if (work.sampled.front().outcome != SampleOutcome::kSampled) {
      log(EDGEC_LOG_ERROR,
          "request " + std::to_string(work.answer->request->id) + ": the model gave a logit that is no number");
      end_all(work.answer->request, EDGEC_FINISH_FAILED);
      continue;
    }
    if (work.sampled.size() > 1) {
      fork(&work, said_[i]);
    } else {
      if (!said_[i].silent) events_.push_back(std::move(said_[i].event));
      if (said_[i].finish != EDGEC_FINISH_NONE) end(work.answer, said_[i].finish);
    }
    work.answer->request->forked = true;
  }

  step_seconds_ += seconds;
  if (recent_.size() < kRecentSteps) {
    recent_.push_back(seconds);
  } else {
    recent_[recent_at_] = seconds;
    recent_at_ = (recent_at_ + 1) % kRecentSteps;
  }
}

// The prompt of a request with n sequences is computed: the other n − 1 start from the same blocks, each with its own
// first token.
void Engine::fork(Work* work, Said& first) {
  Request* request = work->answer->request;
  const int32_t position = work->chunk.start + work->chunk.count;
  const int32_t room = scheduler_->room(work->chunk.sequence);
  std::vector<Said> said;
  said.push_back(std::move(first));
  for (size_t i = 1; i < request->answers.size(); ++i) {
    Answer* answer = request->answers[i].get();
    const Sampled& sampled = work->sampled[i];
    said.push_back(say(answer, sampled, position, room, manifest_.eos));
    if (said.back().finish == EDGEC_FINISH_NONE) scheduler_->fork(work->chunk.sequence, answer->id(), &sampled.token);
  }
  for (size_t i = 0; i < said.size(); ++i) {
    Answer* answer = request->answers[i].get();
    if (!said[i].silent) events_.push_back(std::move(said[i].event));
    if (said[i].finish == EDGEC_FINISH_NONE) continue;
    scheduler_->finish(answer->id());
    end(answer, said[i].finish);
  }
}

void Engine::end_all(Request* request, int32_t finish) {
  for (const std::unique_ptr<Answer>& answer : request->answers) {
    if (answer->finished) continue;
    scheduler_->cancel(answer->id());
    end(answer.get(), finish);
  }
}

// The model failed: nothing of the step counts, and whoever was in it ends, so that the others can go on.
void Engine::fail_step() {
  failures_ += 1;
  scheduler_->release(plan_);
  for (const Work& work : work_) end_all(work.answer->request, EDGEC_FINISH_FAILED);
}

// A hot device: spend the share of the time idle that the app asks for.
void Engine::rest(double seconds) const {
  if (config_.thermal == nullptr) return;
  const int32_t asked = config_.thermal(config_.user);
  const double share = std::min(std::max(asked, 0), 95) / 100.0;
  if (share <= 0.0) return;
  std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds * share / (1.0 - share), 1.0)));
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
  for (int32_t i = 0; i < pool.total(); ++i)
    if (pool.is_free(pool.first_block() + i)) store_->discard(pool.first_block() + i);
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
  if (!recent_.empty()) {
    std::vector<double> sorted = recent_;
    std::sort(sorted.begin(), sorted.end());
    out.step_p50_ms = 1e3 * sorted[sorted.size() / 2];
    out.step_p99_ms = 1e3 * sorted[(sorted.size() * 99) / 100];
  }
  return out;
}

void Engine::forward(const int32_t* tokens, const int32_t* positions, const int32_t* slots, const int32_t* sequence,
                     int32_t rows, const int32_t* tables, int32_t sequences, int32_t width, float* logits,
                     float* hidden) {
  const Stepping stepping(stepping_);
  require(tokens != nullptr && positions != nullptr && slots != nullptr && sequence != nullptr && tables != nullptr,
          EDGEC_INVALID_ARGUMENT, "a null array");
  require(rows >= 0 && sequences > 0 && width > 0, EDGEC_INVALID_ARGUMENT, "sizes must be positive");
  const int bs = config_.block_size;
  for (int64_t i = 0; i < static_cast<int64_t>(sequences) * width; ++i)
    require(tables[i] >= 0 && tables[i] < store_->blocks(), EDGEC_INVALID_ARGUMENT,
            "a block that the pool doesn't have");
  for (int32_t i = 0; i < rows; ++i) {
    require(tokens[i] >= 0 && tokens[i] < manifest_.model.vocab_size, EDGEC_INVALID_ARGUMENT,
            "a token outside the vocabulary");
    require(sequence[i] >= 0 && sequence[i] < sequences, EDGEC_INVALID_ARGUMENT, "a row of no sequence");
    require(positions[i] >= 0 && positions[i] < config_.context && positions[i] / bs < width, EDGEC_INVALID_ARGUMENT,
            "a position beyond the context or the table");
    require(slots[i] >= 0 && slots[i] / bs < store_->blocks(), EDGEC_INVALID_ARGUMENT, "a slot beyond the pool");
  }
  const size_t vocab = manifest_.model.vocab_size, size = manifest_.model.hidden_size;
  Batch batch;
  for (int32_t s = 0; s < sequences; ++s) batch.tables.push_back(tables + static_cast<size_t>(s) * width);
  for (int32_t start = 0; start < rows; start += decoder_->max_rows()) {
    const int32_t count = std::min(rows - start, decoder_->max_rows());
    batch.rows.clear();
    for (int32_t i = start; i < start + count; ++i)
      batch.rows.push_back({tokens[i], positions[i], slots[i], sequence[i], logits != nullptr || hidden != nullptr});
    decoder_->forward(batch);
    if (hidden != nullptr) std::memcpy(hidden + start * size, decoder_->hidden(0), sizeof(float) * count * size);
    for (int32_t first = 0; logits != nullptr && first < count; first += decoder_->max_wanted()) {
      const int32_t part = std::min(count - first, decoder_->max_wanted());
      decoder_->project(first, part);
      for (int32_t i = 0; i < part; ++i)
        std::memcpy(logits + (start + first + i) * vocab, decoder_->logits(i), sizeof(float) * vocab);
    }
  }
}

}  // namespace edgec
