// One iteration: plan, reserve, run, commit or release.
#include <algorithm>
#include <chrono>
#include <thread>

#include "clock.h"
#include "engine.h"
#include "status.h"

namespace edgec {
namespace {

constexpr size_t kRecentSteps = 256;
static_assert(kMostDrafts <= kMostBranch, "a branch of proposals must fit");

// Where a sequence with this block table keeps a position.
int32_t slot_of(const int32_t* blocks, int32_t position, int32_t block_size) {
  return blocks[position / block_size] * block_size + position % block_size;
}

}  // namespace

StepOutcome Engine::step() {
  const Stepping stepping(stepping_);
  const double start = now();
  const StepOutcome outcome = run_step();
  if (outcome == StepOutcome::kCommitted) rest(now() - start);
  return outcome;
}

StepOutcome Engine::run_step() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    sweep();
  }
  propose();
  const double start = now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
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
  batch_.branches.clear();
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
    const int32_t own = static_cast<int32_t>(tokens.size());
    const int32_t table = static_cast<int32_t>(batch_.tables.size());
    tables_.push_back(scheduler_->block_table(chunk.sequence));  // a copy: `cancel` may forget the sequence meanwhile
    const int32_t* blocks = tables_.back().data();
    int32_t longest = 0;
    batch_.tables.push_back(blocks);
    for (int32_t p = chunk.start; p < end; ++p) {
      const bool scores = request->score_prompt && answer->index == 0 && p >= request->scored && p + 1 < prompt;
      const bool wanted = scores || (chunk.samples && p + 1 + chunk.drafts >= end);
      const int32_t slot = slot_of(blocks, p, config_.block_size);
      const int32_t token = p < own ? tokens[p] : answer->proposals[p - own].token;
      batch_.rows.push_back({token, p, slot, table, wanted});
      if (p >= own) longest = std::max(longest, place_proposal(*answer, p - own, own, blocks));
      if (wanted)
        uses_.push_back({work_.size(), batch_.rows.back().position, p < own ? -1 : p - own, scores, 0.0f, {}});
    }
    work_.push_back({});
    Work& work = work_.back();
    work.chunk = chunk;
    work.answer = answer;
    work.longest = longest;
    work.forks = chunk.samples && !request->forked && request->params.n > 1;
  }
  if (plan_.padding > 0) {  // static batching: rows that are computed for nothing, as far along as the others
    int32_t position = 0;
    for (const Batch::Row& row : batch_.rows) position = std::max(position, row.position);
    const int32_t room = std::min(decoder_->max_rows() - static_cast<int32_t>(batch_.rows.size()),
                                  scheduler_->config().first_block * config_.block_size);
    const int32_t table = static_cast<int32_t>(batch_.tables.size());
    batch_.tables.push_back(scratch_table_.data());
    for (int32_t slot = 0; slot < std::min(plan_.padding, room); ++slot)
      batch_.rows.push_back({0, position, slot, table, true});
  }
}

// The newest row is a proposal's, in the slot of its number: it stands where its branch puts it, and sees that branch
// alone. Returns its place, from 1.
int32_t Engine::place_proposal(const Answer& answer, int32_t proposal, int32_t own, const int32_t* blocks) {
  int32_t branch[kMostDrafts], length = 0;
  bool straight = true;  // the table has this branch as it is
  for (int32_t i = proposal; i >= 0; i = answer.proposals[i].parent) {
    branch[length++] = i;
    straight = straight && answer.proposals[i].parent == i - 1;
  }
  Batch::Row& row = batch_.rows.back();
  row.position = own + length - 1;
  const int32_t place = length;
  if (straight) return place;
  row.branch = static_cast<int32_t>(batch_.branches.size());
  row.branch_length = length;
  while (length > 0) batch_.branches.push_back(slot_of(blocks, own + branch[--length], config_.block_size));
  return place;
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
    // From here on memory is idle, and the head will most likely be asked again.
    if (asked_head_ && first + count == wanted) threads_->read_ahead();
    const double projected = now();
    const int used = std::min(count, static_cast<int>(uses_.size()) - first);
    if (used > 0) {
      find_uses(static_cast<size_t>(first), static_cast<size_t>(used));
      threads_->run(static_cast<int>(ranges_.size()), [&](int i, int thread) {
        for (size_t use = ranges_[i].first; use < ranges_[i].second; ++use)
          use_row(use, decoder_->logits(static_cast<int>(use) - first), thread);
      });
    }
    sampling += now() - projected;
  }
  for (const Work& work : work_) keep_branch(work);
  sample_seconds_ += sampling;
  forward_seconds_ += now() - start - sampling;
}

// Keys and values of the branch that was kept move to where a sequence has them.
void Engine::keep_branch(const Work& work) {
  const int32_t own = work.chunk.start + work.chunk.count - work.chunk.drafts, size = config_.block_size;
  const int32_t* blocks = tables_[static_cast<size_t>(&work - work_.data())].data();
  for (int32_t i = 0; i < static_cast<int32_t>(work.path.size()); ++i)  // ascending, and no number is below its place
    if (work.path[i] != i) store_->copy_slot(slot_of(blocks, own + work.path[i], size), slot_of(blocks, own + i, size));
}

// What can be done at once: each row alone, but the proposals of a sequence one after the other.
void Engine::find_uses(size_t first, size_t count) {
  ranges_.clear();
  for (size_t use = first; use < first + count; ++use) {
    if (use > first && uses_[use].work == uses_[use - 1].work && work_[uses_[use].work].chunk.drafts > 0)
      ranges_.back().second = use + 1;
    else
      ranges_.push_back({use, use + 1});
  }
}

void Engine::use_row(size_t index, float* logits, int thread) {
  const int32_t vocab = manifest_.model.vocab_size;
  Use& use = uses_[index];
  Work& work = work_[use.work];
  const Request& request = *work.answer->request;
  Sampler& sampler = samplers_[thread];
  if (use.scores) {
    use.logprob = Sampler::logprob(logits, vocab, request.prompt[use.position + 1]);
    if (request.params.logprobs > 0) {
      SamplingParams alternatives;
      alternatives.temperature = 0.0f;
      alternatives.logprobs = request.params.logprobs;
      use.top = sampler.sample(logits, vocab, alternatives, nullptr, 0, 0, 0).top;
    }
    return;
  }
  if (!work.forks) {
    if (!work.ended && use.proposal == work.at()) verify_row(&work, index, logits, &sampler);
    return;
  }
  const uint32_t position = static_cast<uint32_t>(use.position + 1);
  std::vector<float>& copy = row_copies_[thread];  // sampling overwrites its row
  for (const std::unique_ptr<Answer>& answer : request.answers) {
    copy.assign(logits, logits + vocab);
    work.sampled.push_back(sampler.sample(copy.data(), vocab, request.params, &answer->history, request.seed,
                                          static_cast<uint32_t>(answer->index), position));
    keep_hidden(answer.get(), index);
  }
}

// One position of a sequence that decodes: what comes next, and whether it was proposed.
void Engine::verify_row(Work* work, size_t index, float* logits, Sampler* sampler) {
  static const std::vector<int32_t> kNoTokens;
  const int32_t vocab = manifest_.model.vocab_size, at = uses_[index].proposal;
  Answer& answer = *work->answer;
  const Request& request = *answer.request;
  const SamplingParams& params = request.params;
  const uint32_t sequence = static_cast<uint32_t>(answer.index);
  const uint32_t place = static_cast<uint32_t>(uses_[index].position + 1);
  int32_t first = at + 1;
  while (first < work->chunk.drafts && answer.proposals[first].parent != at) ++first;
  int32_t next = -1;
  if (first < work->chunk.drafts) work->reached += 1;
  if (first < work->chunk.drafts && !answer.proposals[first].weights.empty()) {  // drawn, so it stands alone
    bool kept;
    work->sampled.push_back(sampler->verify(logits, vocab, params, &answer.history, request.seed, sequence, place,
                                            answer.proposals[first], head_ != nullptr ? head_->tokens() : kNoTokens,
                                            &kept));
    if (kept) next = first;
  } else {
    work->sampled.push_back(sampler->sample(logits, vocab, params, &answer.history, request.seed, sequence, place));
    for (int32_t i = first; i < work->chunk.drafts && next < 0; ++i)
      if (answer.proposals[i].parent == at && answer.proposals[i].token == work->sampled.back().token) next = i;
  }
  if (next >= 0) work->path.push_back(next);
  work->ended = next < 0 || work->sampled.back().outcome != SampleOutcome::kSampled;
  if (!work->ended) {  // the next position's penalties see what this one gave; `commit` counts it for good
    if (params.has_penalties()) answer.history.add_answer(work->sampled.back().token);
    return;
  }
  if (params.has_penalties())
    for (size_t i = 0; i + 1 < work->sampled.size(); ++i) answer.history.remove_answer(work->sampled[i].token);
  keep_hidden(&answer, index);
}

void Engine::keep_hidden(Answer* answer, size_t use) {
  if (head_ == nullptr) return;
  const float* hidden = decoder_->hidden(static_cast<int>(use));
  answer->hidden.assign(hidden, hidden + manifest_.model.hidden_size);
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
  for (Work& work : work_) {
    if (!work.chunk.samples || work.answer->finished) continue;
    if (work.sampled.back().outcome != SampleOutcome::kSampled) {
      results_.push_back({work.chunk.sequence, nullptr, 0, true});
      continue;
    }
    const int32_t position = work.chunk.start + work.chunk.count - work.chunk.drafts;
    int32_t finish = EDGEC_FINISH_NONE;
    for (size_t i = 0; i < (work.forks ? 1 : work.sampled.size()) && finish == EDGEC_FINISH_NONE; ++i) {
      const int32_t at = static_cast<int32_t>(i);
      work.said.push_back(say(work.answer, work.sampled[i], position + at,
                              scheduler_->room(work.chunk.sequence) - 1 - at, manifest_.eos));
      finish = work.said.back().finish;
      if (!(work.said.back().silent && !work.forks)) work.tokens.push_back(work.sampled[i].token);
    }
    // A parent stays a moment longer than its first token, for its children.
    results_.push_back({work.chunk.sequence, work.tokens.data(), static_cast<int32_t>(work.tokens.size()),
                        finish != EDGEC_FINISH_NONE && !work.forks});
  }
  scheduler_->commit(plan_, results_.data(), results_.size(), seconds);
  account_drafts(seconds);

  for (Work& work : work_) {
    if (!work.chunk.samples || work.answer->finished) continue;
    if (work.sampled.back().outcome != SampleOutcome::kSampled) {
      log(EDGEC_LOG_ERROR,
          "request " + std::to_string(work.answer->request->id) + ": the model gave a logit that is no number");
      end_all(work.answer->request, EDGEC_FINISH_FAILED);
      continue;
    }
    if (work.forks) {
      fork(&work);
    } else {
      for (Said& said : work.said) {
        if (!said.silent) events_.push_back(std::move(said.event));
        if (said.finish != EDGEC_FINISH_NONE) end(work.answer, said.finish);
      }
      work.answer->newest = work.sampled.back().token;
      work.answer->hidden_of =
          static_cast<size_t>(work.chunk.start + work.chunk.count - work.chunk.drafts) + work.sampled.size();
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

// What became of proposals, and what the pass cost, for the decision how many to make.
void Engine::account_drafts(double seconds) {
  bool decodes_only = true;
  int tokens = 0;
  for (const Work& work : work_) {
    decodes_only = decodes_only && work.chunk.samples && work.chunk.count == 1 + work.chunk.drafts;
    tokens += static_cast<int>(work.sampled.size());
    if (grows_trees()) judge_guesses(work);
    if (work.chunk.drafts == 0) continue;
    const int kept = static_cast<int>(work.path.size());
    draft_runs_ += 1;
    draft_places_ += static_cast<uint64_t>(work.longest);
    drafted_tokens_ += static_cast<uint64_t>(work.chunk.drafts);
    for (int i = 0; i < work.reached; ++i) {
      draft_reached_[i] += 1;
      draft_kept_[i] += i < kept ? 1 : 0;
    }
    if (grows_trees())
      judge_candidates(work);
    else
      control_.verified(work.answer->source, work.reached, kept);
  }
  if (!decodes_only) return;
  control_.stepped(plan_.rows, seconds);
  if (grown_.decoding > 0)
    control_.grown(grown_.decoding, grown_.greedy, grown_.headed, tokens, seconds + grown_.seconds);
}

// How the head's probabilities have turned out, at the places that were looked at.
void Engine::judge_candidates(const Work& work) {
  const Answer& answer = *work.answer;
  int32_t at = -1;
  for (int i = 0; i < work.reached; ++i) {
    const int32_t next = i < static_cast<int>(work.path.size()) ? work.path[i] : -1;
    for (int32_t j = at + 1; j < work.chunk.drafts; ++j)
      if (answer.proposals[j].parent == at && answer.proposals[j].chance > 0)
        control_.judged(answer.proposals[j].chance, answer.request->params.greedy(), j == next);
    at = next;
  }
}

// How the text would have gone on as it did before, proposed or not.
void Engine::judge_guesses(const Work& work) {
  const Answer& answer = *work.answer;
  const int known = static_cast<int>(std::min(answer.guesses.size(), work.sampled.size()));
  int right = 0;
  while (right < known && work.sampled[right].token == answer.guesses[right]) ++right;
  if (known > 0) control_.verified(answer.source, known, right);
}

// The prompt of a request with n sequences is computed: the other n − 1 start from the same blocks, each with its own
// first token.
void Engine::fork(Work* work) {
  Request* request = work->answer->request;
  const int32_t position = work->chunk.start + work->chunk.count;
  const int32_t room = scheduler_->room(work->chunk.sequence);
  std::vector<Said>& said = work->said;
  for (size_t i = 1; i < request->answers.size(); ++i) {
    Answer* answer = request->answers[i].get();
    const Sampled& sampled = work->sampled[i];
    said.push_back(say(answer, sampled, position, room, manifest_.eos));
    if (said.back().finish == EDGEC_FINISH_NONE) scheduler_->fork(work->chunk.sequence, answer->id(), &sampled.token);
  }
  for (size_t i = 0; i < said.size(); ++i) {
    Answer* answer = request->answers[i].get();
    answer->newest = work->sampled[i].token;
    answer->hidden_of = static_cast<size_t>(position) + 1;
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

}  // namespace edgec
