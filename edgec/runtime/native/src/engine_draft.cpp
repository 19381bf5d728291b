// Before a step: which sequences propose tokens, how many, and which.
#include <algorithm>
#include <cstring>

#include "clock.h"
#include "engine.h"
#include "ngram.h"

namespace edgec {
namespace {

// An ending of two tokens is often found again by chance; of four rarely.
constexpr int32_t kLeastMatch = 2, kLongMatch = 4, kMostMatch = 8;
constexpr int32_t kMatchWindow = 4096;  // tokens looked through, some microseconds

}  // namespace

bool Engine::may_speculate(const Request& request) const {
  const SamplingParams& p = request.params;
  if (p.speculate != EDGEC_SPECULATE_DEFAULT) return p.speculate == EDGEC_SPECULATE_ALWAYS;
  return p.greedy() || !p.has_seed;
}

void Engine::propose() {
  drafting_.clear();
  if (!config_.head_drafts && !config_.ngram_drafts) return;
  int longest = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    int decoding = 0, from[kDraftSources] = {};
    const bool head_first = control_.prefers(DraftSource::kHead, DraftSource::kShortMatch);
    for (const auto& [id, request] : requests_) {
      for (const std::unique_ptr<Answer>& answer : request->answers) {
        const Sequence* sequence = answer->finished ? nullptr : scheduler_->find(answer->id());
        answer->proposed = 0;
        if (sequence == nullptr || sequence->state != Sequence::State::kRunning || sequence->pending() != 1) continue;
        decoding += 1;
        if (!may_speculate(*request)) continue;
        if (request->params.n > 1 && !request->forked) continue;  // the row gives n sequences their first token
        NgramMatch match;
        if (config_.ngram_drafts) match = find_ngram(sequence->tokens, kLeastMatch, kMostMatch, kMatchWindow);
        const bool head = config_.head_drafts && answer->hidden_of == sequence->tokens.size();
        if (match.length > 0 && match.length < kLongMatch && head && head_first) match = {};
        if (match.length == 0 && !head) continue;
        answer->source = match.length == 0            ? DraftSource::kHead
                         : match.length >= kLongMatch ? DraftSource::kLongMatch
                                                      : DraftSource::kShortMatch;
        answer->proposals.resize(kMostDrafts);
        // What follows the ending may run up to the text's end, and then goes on with what has just been proposed.
        for (int i = 0; match.length > 0 && i < kMostDrafts; ++i) {
          const size_t at = static_cast<size_t>(match.next) + i, own = sequence->tokens.size();
          answer->proposals[i] = Proposal();
          answer->proposals[i].token = at < own ? sequence->tokens[at] : answer->proposals[at - own].token;
        }
        from[static_cast<int>(answer->source)] += 1;
        drafting_.push_back(answer.get());
      }
    }
    int length[kDraftSources] = {};
    for (int s = 0; s < kDraftSources; ++s)
      if (from[s] > 0) length[s] = control_.length(static_cast<DraftSource>(s), from[s], decoding);
    for (Answer* answer : drafting_) {
      const int room = scheduler_->room(answer->id()) - 1;
      answer->proposed = std::max(0, std::min(length[static_cast<int>(answer->source)], room));
      if (answer->source == DraftSource::kHead) longest = std::max(longest, answer->proposed);
    }
  }
  // Requests are forgotten between steps only, so these answers stay while others submit and cancel.
  if (longest > 0) draft_by_head(longest);
  std::lock_guard<std::mutex> lock(mutex_);
  int32_t tokens[kMostDrafts];
  for (Answer* answer : drafting_) {
    if (answer->finished || scheduler_->find(answer->id()) == nullptr) continue;
    for (int i = 0; i < answer->proposed; ++i) tokens[i] = answer->proposals[i].token;
    scheduler_->set_draft(answer->id(), tokens, answer->proposed);
  }
}

// All sequences together, one proposal after the other.
void Engine::draft_by_head(int longest) {
  const double start = now();
  const size_t hidden = manifest_.model.hidden_size;
  std::vector<Answer*> rows;
  for (Answer* answer : drafting_)
    if (answer->source == DraftSource::kHead && answer->proposed > 0) rows.push_back(answer);
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Answer* a, const Answer* b) { return a->proposed > b->proposed; });
  draft_states_.resize(rows.size() * hidden);
  draft_inputs_.resize(rows.size());
  std::vector<int> lengths(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    std::memcpy(draft_states_.data() + r * hidden, rows[r]->hidden.data(), sizeof(float) * hidden);
    draft_inputs_[r] = rows[r]->newest;
    lengths[r] = rows[r]->proposed;
  }
  for (int i = 0; i < longest; ++i) {
    int count = 0;
    while (count < static_cast<int>(rows.size()) && lengths[count] > i) ++count;
    head_->step(draft_inputs_.data(), count, draft_states_.data());
    threads_->run(count, [&](int r, int thread) {
      Answer& answer = *rows[r];
      Proposal& proposal = answer.proposals[i];
      samplers_[thread].propose(head_->logits(r), head_->vocab(), answer.request->params, answer.request->seed,
                                static_cast<uint32_t>(answer.index), static_cast<uint32_t>(answer.hidden_of + i),
                                &proposal);
      if (proposal.token < 0) {  // a head that gives NaN proposes nothing from here on
        answer.proposed = std::min(answer.proposed, i);
        return;
      }
      proposal.token = head_->token(proposal.token);
      draft_inputs_[r] = proposal.token;
    });
  }
  draft_seconds_ += now() - start;
  control_.drafted(longest, now() - start);
}

}  // namespace edgec
