// A request's way from prompt to text: its sampling, its sequences, and the events that its owner sees.
#ifndef EDGEC_REQUEST_H
#define EDGEC_REQUEST_H

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "detokenizer.h"
#include "draft_control.h"
#include "draft_tree.h"
#include "sampler.h"
#include "sampling_params.h"
#include "step_plan.h"
#include "stop_strings.h"

namespace edgec {

constexpr int kSequenceBits = 6;  // of a SequenceId: which of the request's sequences; the rest is the request

struct Event {
  edgec_event abi;  // its pointers are set when it is polled
  std::string text;
  std::vector<edgec_token_logprob> top;
};

struct Request;

// One sequence of a request: what has been said so far, as tokens and as text.
struct Answer {
  Answer(Request* owner, int number, const Tokenizer& tokenizer, std::shared_ptr<const StopStrings> stop)
      : request(owner), index(number), detokenizer(tokenizer, true), matcher(std::move(stop)) {}

  SequenceId id() const;

  Request* request;
  int index;
  bool finished = false;
  int32_t tokens = 0;  // committed, without an end-of-sequence token
  History history;     // filled only when penalties look at it
  Detokenizer detokenizer;
  StopMatcher matcher;

  // Of speculation. `hidden` is the state from which the newest token was sampled, the last of `hidden_of` tokens; the
  // draft head starts there.
  std::vector<float> hidden;
  int32_t newest = -1;
  size_t hidden_of = 0;
  DraftSource source = DraftSource::kHead;  // of the proposals:
  std::vector<Proposal> proposals;          // for the coming step; only the first `proposed` count
  int proposed = 0;
  bool heads = false;  // the head may propose
  DraftTree tree;
  std::vector<int32_t> guesses;  // how the text would go on as it did at its match
};

struct Request {
  uint64_t id = 0;
  SamplingParams params;
  uint64_t seed = 0;
  bool score_prompt = false;
  std::vector<int32_t> prompt;
  int32_t scored = 0;          // prompt positions whose scores are out
  int32_t cached_tokens = -1;  // of the prompt, at its first start; −1: not started
  std::vector<std::unique_ptr<Answer>> answers;
  int unfinished = 0;
  bool forked = false;  // its n sequences exist (n > 1: only once the prompt is computed)

  bool ends(int32_t token, const std::vector<int32_t>& eos) const;
};

// An event without text, to be filled in.
Event make_event(const Answer& answer, int32_t kind);

// What became of a token that was appended to an answer.
struct Said {
  Event event;     // the TOKEN event; not to be sent when `silent`
  bool silent;     // an end-of-sequence or stop token: it ends the answer, and isn't part of it
  int32_t finish;  // EDGEC_FINISH_NONE while the answer goes on
};

// Append a sampled token at `position`; `room` is how many more tokens the context could take after it.
Said say(Answer* answer, const Sampled& sampled, int32_t position, int32_t room, const std::vector<int32_t>& eos);

// The last event of an answer, with the text that was still held back.
Event finish_event(Answer* answer, int32_t finish);

}  // namespace edgec

#endif  // EDGEC_REQUEST_H
