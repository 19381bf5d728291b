// A test's view of the C ABI: open a bundle, ask, and collect what comes.
#ifndef EDGEC_SESSION_H
#define EDGEC_SESSION_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "edgec.h"

namespace edgec {

struct Heard {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<float> scores;  // of the prompt
  std::string text;
  int32_t finish = EDGEC_FINISH_NONE;
  int32_t cached = 0;
  int32_t counted = 0;

  bool operator==(const Heard& other) const {
    return tokens == other.tokens && text == other.text && finish == other.finish &&
           logprobs.size() == other.logprobs.size() &&
           (logprobs.empty() ||
            std::memcmp(logprobs.data(), other.logprobs.data(), sizeof(float) * logprobs.size()) == 0);
  }
};

class Session {
 public:
  explicit Session(const std::string& folder, edgec_engine_options options = EDGEC_ENGINE_OPTIONS_INIT) {
    status = edgec_engine_create(folder.c_str(), &options, &engine);
  }
  ~Session() { edgec_engine_destroy(engine); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  uint64_t ask(const std::vector<int32_t>& prompt, const edgec_sampling& sampling, int32_t priority = 0,
               bool score = false) {
    edgec_request request;
    std::memset(&request, 0, sizeof(request));
    request.struct_size = sizeof(request);
    request.tokens = prompt.data();
    request.token_count = static_cast<int32_t>(prompt.size());
    request.priority = priority;
    request.score_prompt = score ? 1 : 0;
    request.sampling = sampling;
    uint64_t id = 0;
    refused = edgec_engine_submit(engine, &request, &id);
    return id;
  }

  int32_t step() {
    int32_t outcome = -1;
    CHECK_EQ(edgec_engine_step(engine, &outcome), EDGEC_OK);
    listen();
    return outcome;
  }

  void run(int limit = 100000) {
    while (limit-- > 0) {
      const int32_t outcome = step();
      if (outcome == EDGEC_STEP_IDLE) return;
      CHECK(outcome == EDGEC_STEP_COMMITTED || outcome == EDGEC_STEP_RETRY);
      if (outcome != EDGEC_STEP_COMMITTED && outcome != EDGEC_STEP_RETRY) return;
    }
    CHECK(!"the engine does not come to an end");
  }

  void listen() {
    edgec_event events[8];
    int32_t count = 8;
    while (count == 8) {
      CHECK_EQ(edgec_engine_poll(engine, events, 8, &count), EDGEC_OK);
      for (int32_t i = 0; i < count; ++i) {
        Heard& heard = answers[{events[i].request, events[i].sequence}];
        heard.text.append(events[i].text, static_cast<size_t>(events[i].text_bytes));
        if (events[i].kind == EDGEC_EVENT_TOKEN) {
          heard.tokens.push_back(events[i].token);
          heard.logprobs.push_back(events[i].logprob);
        } else if (events[i].kind == EDGEC_EVENT_PROMPT_SCORE) {
          heard.scores.push_back(events[i].logprob);
        } else {
          heard.finish = events[i].finish;
          heard.cached = events[i].cached_tokens;
          heard.counted = events[i].answer_tokens;
        }
      }
    }
  }

  edgec_stats stats() const {
    edgec_stats out;
    std::memset(&out, 0, sizeof(out));
    out.struct_size = sizeof(out);
    CHECK_EQ(edgec_engine_stats(engine, &out), EDGEC_OK);
    return out;
  }

  const Heard& heard(uint64_t id, int32_t sequence = 0) { return answers[{id, sequence}]; }

  edgec_engine* engine = nullptr;
  edgec_status status, refused = EDGEC_OK;
  std::map<std::pair<uint64_t, int32_t>, Heard> answers;
};

inline edgec_sampling greedy(int32_t max_tokens) {
  edgec_sampling sampling = EDGEC_SAMPLING_INIT;
  sampling.temperature = 0.0f;
  sampling.max_tokens = max_tokens;
  sampling.logprobs = 0;
  sampling.ignore_eos = 1;
  return sampling;
}

inline edgec_sampling sampled(int32_t max_tokens, uint64_t seed) {
  edgec_sampling sampling = greedy(max_tokens);
  sampling.temperature = 0.9f;
  sampling.top_p = 0.95f;
  sampling.seed = seed;
  sampling.has_seed = 1;
  return sampling;
}

inline std::vector<int32_t> prompt(int length, int seed) {
  std::vector<int32_t> tokens;
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761u + 1;
  for (int i = 0; i < length; ++i) {
    state = state * 1664525u + 1013904223u;
    tokens.push_back(static_cast<int32_t>((state >> 16) % 256));
  }
  return tokens;
}

}  // namespace edgec

#endif  // EDGEC_SESSION_H
