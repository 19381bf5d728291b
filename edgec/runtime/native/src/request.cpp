#include "request.h"

#include <algorithm>
#include <limits>

namespace edgec {

SequenceId Answer::id() const { return request->id << kSequenceBits | static_cast<SequenceId>(index); }

bool Request::ends(int32_t token, const std::vector<int32_t>& eos) const {
  if (!params.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) return true;
  return std::find(params.stop_tokens.begin(), params.stop_tokens.end(), token) != params.stop_tokens.end();
}

Event make_event(const Answer& answer, int32_t kind) {
  Event event = {};
  event.abi.request = answer.request->id;
  event.abi.sequence = answer.index;
  event.abi.kind = kind;
  event.abi.token = -1;
  event.abi.logprob = std::numeric_limits<float>::quiet_NaN();
  return event;
}

Said say(Answer* answer, const Sampled& sampled, int32_t position, int32_t room, const std::vector<int32_t>& eos) {
  const Request& request = *answer->request;
  Said said = {make_event(*answer, EDGEC_EVENT_TOKEN), false, EDGEC_FINISH_NONE};
  if (request.ends(sampled.token, eos)) {
    said.silent = true;
    said.finish = EDGEC_FINISH_STOP;
    return said;
  }
  said.event.abi.token = sampled.token;
  said.event.abi.position = position;
  if (request.params.logprobs >= 0) said.event.abi.logprob = sampled.logprob;
  said.event.top = sampled.top;
  answer->tokens += 1;
  if (request.params.has_penalties()) answer->history.add_answer(sampled.token);
  std::string text;
  answer->detokenizer.push(sampled.token, &text);
  const bool stopped = answer->matcher.push(text, &said.event.text);
  if (stopped)
    said.finish = EDGEC_FINISH_STOP;
  else if (room <= 0 || (request.params.max_tokens > 0 && answer->tokens >= request.params.max_tokens))
    said.finish = EDGEC_FINISH_LENGTH;
  return said;
}

Event finish_event(Answer* answer, int32_t finish) {
  Event event = make_event(*answer, EDGEC_EVENT_FINISH);
  if (!answer->matcher.stopped()) {
    std::string rest;
    answer->detokenizer.flush(&rest);
    if (!answer->matcher.push(rest, &event.text)) answer->matcher.flush(&event.text);
  }
  event.abi.finish = finish;
  event.abi.prompt_tokens = static_cast<int32_t>(answer->request->prompt.size());
  event.abi.cached_tokens = std::max(answer->request->cached_tokens, 0);
  event.abi.answer_tokens = answer->tokens;
  return event;
}

}  // namespace edgec
