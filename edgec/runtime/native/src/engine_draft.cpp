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
constexpr double kSure = 0.8;           // of an n-gram's first guess: then the head isn't asked

}  // namespace

bool Engine::may_speculate(const Request& request) const {
  const SamplingParams& p = request.params;
  if (p.speculate != EDGEC_SPECULATE_DEFAULT) return p.speculate == EDGEC_SPECULATE_ALWAYS;
  return p.greedy() || !p.has_seed || !config_.head_drafts || grows_trees();
}

void Engine::propose() {
  drafting_.clear();
  grown_ = Grown();
  asked_head_ = false;
  threads_->stop_ahead();
  if (!config_.head_drafts && !config_.ngram_drafts) return;
  int longest = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const int decoding = find_drafting();
    if (drafting_.empty()) return;
    if (grows_trees())
      prepare_trees(decoding);
    else
      longest = prepare_chains(decoding);
  }
  // Requests are forgotten between steps only, so these answers stay while others submit and cancel.
  if (grows_trees())
    draft_trees();
  else if (longest > 0)
    draft_chains(longest);
  std::lock_guard<std::mutex> lock(mutex_);
  int32_t tokens[kMostDrafts];
  for (Answer* answer : drafting_) {
    if (answer->finished || scheduler_->find(answer->id()) == nullptr) continue;
    for (int i = 0; i < answer->proposed; ++i) tokens[i] = answer->proposals[i].token;
    scheduler_->set_draft(answer->id(), tokens, answer->proposed);
  }
}

// Who could propose in this step, and what n-grams guess; returns how many sequences decode.
int Engine::find_drafting() {
  int decoding = 0;
  for (const auto& [id, request] : requests_) {
    for (const std::unique_ptr<Answer>& answer : request->answers) {
      const Sequence* sequence = answer->finished ? nullptr : scheduler_->find(answer->id());
      answer->proposed = 0;
      answer->guesses.clear();
      if (sequence == nullptr || sequence->state != Sequence::State::kRunning || sequence->pending() != 1) continue;
      decoding += 1;
      if (!may_speculate(*request)) continue;
      if (request->params.n > 1 && !request->forked) continue;  // the row gives n sequences their first token
      const std::vector<int32_t>& own = sequence->tokens;
      NgramMatch match;
      if (config_.ngram_drafts) match = find_ngram(own, kLeastMatch, kMostMatch, kMatchWindow);
      answer->heads = config_.head_drafts && answer->hidden_of == own.size();
      if (match.length == 0 && !answer->heads) continue;
      answer->source = match.length == 0            ? DraftSource::kHead
                       : match.length >= kLongMatch ? DraftSource::kLongMatch
                                                    : DraftSource::kShortMatch;
      // What follows the ending may run up to the text's end, and then goes on with what has just been guessed.
      for (int i = 0; match.length > 0 && i < kMostDrafts; ++i) {
        const size_t at = static_cast<size_t>(match.next) + i;
        answer->guesses.push_back(at < own.size() ? own[at] : answer->guesses[at - own.size()]);
      }
      answer->proposals.resize(kMostDrafts);
      drafting_.push_back(answer.get());
    }
  }
  return decoding;
}

int Engine::draft_room(const Answer& answer) const { return std::max(0, scheduler_->room(answer.id()) - 1); }

void Engine::prepare_trees(int decoding) {
  grown_.decoding = decoding;
  for (Answer* answer : drafting_) {
    grown_.greedy = grown_.greedy && answer->request->params.greedy();
    answer->proposed = std::min(kMostDrafts, draft_room(*answer));
  }
}

// What the n-grams propose, and how many; returns the most that the head has to.
int Engine::prepare_chains(int decoding) {
  const bool head_first = control_.prefers(DraftSource::kHead, DraftSource::kShortMatch);
  int from[kDraftSources] = {}, length[kDraftSources] = {}, longest = 0;
  for (Answer* answer : drafting_) {
    if (answer->source == DraftSource::kShortMatch && answer->heads && head_first) answer->source = DraftSource::kHead;
    from[static_cast<int>(answer->source)] += 1;
  }
  for (int s = 0; s < kDraftSources; ++s)
    if (from[s] > 0) length[s] = control_.length(static_cast<DraftSource>(s), from[s], decoding);
  for (Answer* answer : drafting_) {
    answer->proposed = std::min(length[static_cast<int>(answer->source)], draft_room(*answer));
    if (answer->source == DraftSource::kHead) {
      longest = std::max(longest, answer->proposed);
      continue;
    }
    for (int i = 0; i < kMostDrafts; ++i) {
      answer->proposals[i] = Proposal();
      answer->proposals[i].token = answer->guesses[i];
      answer->proposals[i].parent = i - 1;
    }
  }
  return longest;
}

// Trees of all sequences together. What was said of an answer's proposals is what there is room for.
void Engine::draft_trees() {
  const double start = now();
  draft_rows_.clear();
  for (Answer* answer : drafting_) {
    answer->tree.clear();
    const bool sure = !answer->guesses.empty() && control_.likely(answer->source, 0) > kSure;
    if (answer->heads && (!sure || config_.draft_length > 0) && answer->proposed > 0 &&
        static_cast<int>(draft_rows_.size()) < head_->max_rows())
      draft_rows_.push_back({answer, -1, draft_rows_.size()});
  }
  if (config_.draft_length == 0 && !control_.trees_pay(grown_.decoding, grown_.greedy)) draft_rows_.clear();
  grown_.headed = !draft_rows_.empty();
  if (grown_.headed) draft_levels();
  for (Answer* answer : drafting_) {
    double likely[kMostDrafts];
    for (int i = 0; i < kMostDrafts; ++i) likely[i] = control_.likely(answer->source, i);
    answer->tree.merge(answer->guesses.data(), static_cast<int>(answer->guesses.size()), likely);
  }
  choose_nodes();
  grown_.seconds = now() - start;
}

// The head's candidates, one level after the other.
void Engine::draft_levels() {
  const double start = now();
  asked_head_ = true;
  const size_t hidden = manifest_.model.hidden_size, roots = draft_rows_.size();
  const size_t beam = std::clamp<size_t>(static_cast<size_t>(kLevelRows) / roots, 1, kWidestTree);
  const int depth = config_.draft_length > 0 ? config_.draft_length : kMostDrafts;
  draft_states_.resize(roots * hidden);
  for (size_t r = 0; r < roots; ++r)
    std::memcpy(draft_states_.data() + r * hidden, draft_rows_[r].answer->hidden.data(), sizeof(float) * hidden);
  int levels = 0;
  double first = 0;
  for (double gain = 0; !draft_rows_.empty() && levels < depth; ++levels) {
    if (levels > 0 && config_.draft_length == 0 && !control_.deeper(gain)) break;
    std::swap(parent_states_, draft_states_);
    draft_states_.resize(draft_rows_.size() * hidden);
    draft_inputs_.resize(draft_rows_.size());
    for (size_t r = 0; r < draft_rows_.size(); ++r) {
      const DraftRow& row = draft_rows_[r];
      std::memcpy(draft_states_.data() + r * hidden, parent_states_.data() + row.state * hidden,
                  sizeof(float) * hidden);
      draft_inputs_[r] = row.node < 0 ? row.answer->newest : row.answer->tree.nodes()[row.node].token;
    }
    const int count = static_cast<int>(draft_rows_.size());
    head_->step(draft_inputs_.data(), count, draft_states_.data());
    if (candidates_.size() < draft_rows_.size()) candidates_.resize(draft_rows_.size());
    threads_->run(count, [&](int r, int thread) {
      const Answer& answer = *draft_rows_[r].answer;
      samplers_[thread].candidates(head_->logits(r), head_->vocab(), answer.request->params, head_->tokens(),
                                   answer.request->seed, static_cast<uint32_t>(answer.index),
                                   static_cast<uint32_t>(answer.hidden_of + static_cast<size_t>(levels)),
                                   config_.draft_width, &candidates_[r]);
    });
    gain = grow(beam);
    if (levels == 0) first = now() - start;
  }
  draft_seconds_ += now() - start;
  control_.drafted(levels, first, now() - start);
}

// Candidates become nodes, and the likeliest of them the rows to follow. Returns the seconds that these promise.
double Engine::grow(size_t beam) {
  std::vector<DraftRow> next;
  double gain = 0;
  for (size_t r = 0; r < draft_rows_.size();) {
    Answer* answer = draft_rows_[r].answer;
    const bool greedy = answer->request->params.greedy();
    const size_t before = answer->tree.nodes().size();
    for (; r < draft_rows_.size() && draft_rows_[r].answer == answer; ++r)
      for (const Candidate& candidate : candidates_[r])
        answer->tree.add(draft_rows_[r].node, head_->token(candidate.token), candidate.probability,
                         control_.likely(candidate.probability, greedy), r);
    if (answer->tree.nodes().size() == before) continue;  // a head that gives NaN proposes nothing
    for (const int32_t node : answer->tree.frontier(beam, static_cast<size_t>(answer->proposed))) {
      const double own = control_.follow_gain(answer->tree.nodes()[node].reach, grown_.decoding, grown_.greedy);
      if (own <= 0 && config_.draft_length == 0) break;  // those behind it are less likely
      gain += own;
      next.push_back({answer, node, answer->tree.nodes()[node].state});
    }
  }
  draft_rows_ = std::move(next);
  return gain;
}

// The likeliest nodes of all trees become proposals: as many as pay, or as there is room for.
void Engine::choose_nodes() {
  struct Choice {
    Answer* answer;
    int32_t node;
    double reach;
  };
  const auto likelier = [](const Choice& a, const Choice& b) { return a.reach > b.reach; };
  std::vector<Choice> choices;
  for (Answer* answer : drafting_) {
    if (answer->proposed == 0) continue;
    const size_t first = choices.size();
    for (size_t i = 0; i < answer->tree.nodes().size(); ++i)
      choices.push_back({answer, static_cast<int32_t>(i), answer->tree.nodes()[i].reach});
    std::stable_sort(choices.begin() + static_cast<std::ptrdiff_t>(first), choices.end(), likelier);
    choices.resize(std::min(choices.size(), first + static_cast<size_t>(answer->proposed)));
  }
  std::stable_sort(choices.begin(), choices.end(), likelier);
  std::vector<double> reach;
  for (const Choice& choice : choices) reach.push_back(choice.reach);
  const size_t count = config_.draft_length > 0
                           ? choices.size()
                           : static_cast<size_t>(control_.rows(reach, grown_.decoding, grown_.greedy));
  for (size_t i = 0; i < count; ++i) choices[i].answer->tree.choose(choices[i].node);
  for (Answer* answer : drafting_) answer->proposed = answer->tree.proposals(&answer->proposals);
}

// All sequences together, one proposal after the other: chains that are drawn.
void Engine::draft_chains(int longest) {
  const double start = now();
  asked_head_ = true;
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
  double first = 0;
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
      proposal.parent = i - 1;
      draft_inputs_[r] = proposal.token;
    });
    if (i == 0) first = now() - start;
  }
  draft_seconds_ += now() - start;
  control_.drafted(longest, first, now() - start);
}

}  // namespace edgec
