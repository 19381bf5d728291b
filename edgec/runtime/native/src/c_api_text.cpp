// The C ABI of the tokenizer (edgec.h), and of the text rooms alone (edgec_text.h).
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "detokenizer.h"
#include "edgec.h"
#include "edgec_text.h"
#include "philox.h"
#include "sampler.h"
#include "status.h"
#include "stop_strings.h"
#include "tokenizer.h"

using edgec::guard;
using edgec::require;

namespace {

void require_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) throw edgec::Error(EDGEC_INVALID_ARGUMENT, std::string(name) + " is null");
}

void require_array(const void* pointer, int64_t count, const char* name) {
  if (count < 0) throw edgec::Error(EDGEC_INVALID_ARGUMENT, std::string(name) + " has a negative count");
  if (count > 0) require_pointer(pointer, name);
}

// A row, copied, with its history; checked.
struct Row {
  std::vector<float> logits;
  edgec::SamplingParams params;
  edgec::History history;

  Row(const edgec_sampler_input* input, const edgec_sampling* sampling) {
    require_pointer(input, "input");
    require_pointer(sampling, "sampling");
    require(input->struct_size == sizeof(edgec_sampler_input), EDGEC_VERSION_MISMATCH,
            "edgec_sampler_input has another size than this library's");
    require(input->vocab > 0, EDGEC_INVALID_ARGUMENT, "vocab must be at least 1");
    require_pointer(input->logits, "logits");
    params = edgec::sampling_params(*sampling, input->vocab);
    logits.assign(input->logits, input->logits + input->vocab);
    for (const int32_t token : tokens(input->prompt, input->prompt_count, input->vocab)) history.add_prompt(&token, 1);
    for (const int32_t token : tokens(input->answer, input->answer_count, input->vocab)) history.add_answer(token);
  }

 private:
  static std::vector<int32_t> tokens(const int32_t* array, int32_t count, int32_t vocab) {
    require_array(array, count, "tokens");
    std::vector<int32_t> result(array, count == 0 ? array : array + count);
    for (const int32_t token : result) {
      require(token >= 0 && token < vocab, EDGEC_INVALID_ARGUMENT, "a token of the history is not in the vocabulary");
    }
    return result;
  }
};

}  // namespace

struct edgec_sampler {
  edgec::Sampler sampler;
};

struct edgec_detokenizer {
  edgec::Detokenizer detokenizer;
  std::string text;
};

struct edgec_stop_matcher {
  edgec::StopMatcher matcher;
  std::string text;
};

// ---- Tokenizer ----------------------------------------------------------------------------------------------------

edgec_status edgec_tokenizer_create(const char* path, edgec_tokenizer** tokenizer) {
  return guard([&] {
    require_pointer(path, "path");
    require_pointer(tokenizer, "tokenizer");
    *tokenizer = nullptr;
    *tokenizer = new edgec_tokenizer{edgec::Tokenizer::from_file(path)};
  });
}

void edgec_tokenizer_destroy(edgec_tokenizer* tokenizer) { delete tokenizer; }

edgec_status edgec_tokenizer_encode(const edgec_tokenizer* tokenizer, const char* text, size_t bytes, int32_t special,
                                    int32_t* tokens, int32_t capacity, int32_t* count) {
  return guard([&] {
    require_pointer(tokenizer, "tokenizer");
    require_pointer(count, "count");
    *count = 0;
    if (bytes > 0) require_pointer(text, "text");
    require_array(tokens, capacity, "tokens");
    const std::vector<int32_t> result = tokenizer->tokenizer.encode({bytes == 0 ? "" : text, bytes}, special != 0);
    *count = static_cast<int32_t>(result.size());
    std::copy_n(result.begin(), std::min(*count, capacity), tokens);
    require(*count <= capacity, EDGEC_BUFFER_TOO_SMALL, "the text has more tokens than fit");
  });
}

edgec_status edgec_tokenizer_decode(const edgec_tokenizer* tokenizer, const int32_t* tokens, int32_t count,
                                    int32_t skip_special, char* text, size_t capacity, size_t* bytes) {
  return guard([&] {
    require_pointer(tokenizer, "tokenizer");
    require_pointer(bytes, "bytes");
    *bytes = 0;
    require_array(tokens, count, "tokens");
    if (capacity > 0) require_pointer(text, "text");
    const std::string result = tokenizer->tokenizer.decode(tokens, static_cast<size_t>(count), skip_special != 0);
    *bytes = result.size();
    std::copy_n(result.begin(), std::min(*bytes, capacity), text);
    require(*bytes <= capacity, EDGEC_BUFFER_TOO_SMALL, "the tokens have more bytes than fit");
  });
}

int32_t edgec_tokenizer_vocab_size(const edgec_tokenizer* tokenizer) {
  return tokenizer == nullptr ? 0 : tokenizer->tokenizer.vocab_size();
}

// ---- Random numbers and sampler -----------------------------------------------------------------------------------

void edgec_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  const edgec::PhiloxBlock block =
      edgec::philox4x32({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  std::copy(block.begin(), block.end(), out);
}

double edgec_uniform(uint64_t seed, uint32_t sequence, uint32_t position, uint32_t draw) {
  return edgec::uniform(seed, sequence, position, static_cast<edgec::Draw>(draw));
}

double edgec_noise(uint64_t seed, uint32_t sequence, uint32_t position, int32_t token) {
  const edgec::NoiseKey key = edgec::noise_key(seed, sequence, position);
  return edgec::noise_time(edgec::noise_bits(key, static_cast<uint32_t>(token)));
}

edgec_status edgec_sampler_create(edgec_sampler** sampler) {
  return guard([&] {
    require_pointer(sampler, "sampler");
    *sampler = new edgec_sampler{};
  });
}

void edgec_sampler_destroy(edgec_sampler* sampler) { delete sampler; }

edgec_status edgec_sampler_sample(edgec_sampler* sampler, const edgec_sampler_input* input,
                                  const edgec_sampling* sampling, edgec_sampler_output* output) {
  return guard([&] {
    require_pointer(sampler, "sampler");
    require_pointer(output, "output");
    Row row(input, sampling);
    const edgec::Sampled sampled = sampler->sampler.sample(row.logits.data(), input->vocab, row.params, &row.history,
                                                           input->seed, input->sequence, input->position);
    *output = {};
    output->bad_logits = sampled.outcome == edgec::SampleOutcome::kBadLogits ? 1 : 0;
    output->token = sampled.token;
    output->logprob = sampled.logprob;
    output->top_count = static_cast<int32_t>(sampled.top.size());
    std::copy(sampled.top.begin(), sampled.top.end(), output->top);
  });
}

edgec_status edgec_sampler_probabilities(edgec_sampler* sampler, const edgec_sampler_input* input,
                                         const edgec_sampling* sampling, int32_t* tokens, double* probabilities,
                                         int32_t capacity, int32_t* count) {
  return guard([&] {
    require_pointer(sampler, "sampler");
    require_pointer(count, "count");
    *count = 0;
    require_array(tokens, capacity, "tokens");
    require_array(probabilities, capacity, "probabilities");
    Row row(input, sampling);
    const std::vector<edgec::TokenProbability> result =
        sampler->sampler.probabilities(row.logits.data(), input->vocab, row.params, &row.history);
    *count = static_cast<int32_t>(result.size());
    require(*count <= capacity, EDGEC_BUFFER_TOO_SMALL, "more tokens have a probability than fit");
    for (size_t i = 0; i < result.size(); ++i) {
      tokens[i] = result[i].token;
      probabilities[i] = result[i].probability;
    }
  });
}

edgec_status edgec_sampling_check(const edgec_sampling* sampling, int32_t vocab) {
  return guard([&] {
    require_pointer(sampling, "sampling");
    edgec::sampling_params(*sampling, vocab);
  });
}

// ---- Detokenizer and stop strings ---------------------------------------------------------------------------------

edgec_status edgec_detokenizer_create(const edgec_tokenizer* tokenizer, int32_t skip_special,
                                      edgec_detokenizer** detokenizer) {
  return guard([&] {
    require_pointer(tokenizer, "tokenizer");
    require_pointer(detokenizer, "detokenizer");
    *detokenizer = new edgec_detokenizer{edgec::Detokenizer(tokenizer->tokenizer, skip_special != 0), {}};
  });
}

void edgec_detokenizer_destroy(edgec_detokenizer* detokenizer) { delete detokenizer; }

edgec_status edgec_detokenizer_push(edgec_detokenizer* detokenizer, int32_t token, const char** text, size_t* bytes) {
  return guard([&] {
    require_pointer(detokenizer, "detokenizer");
    require_pointer(text, "text");
    require_pointer(bytes, "bytes");
    detokenizer->text.clear();
    detokenizer->detokenizer.push(token, &detokenizer->text);
    *text = detokenizer->text.data();
    *bytes = detokenizer->text.size();
  });
}

edgec_status edgec_detokenizer_flush(edgec_detokenizer* detokenizer, const char** text, size_t* bytes) {
  return guard([&] {
    require_pointer(detokenizer, "detokenizer");
    require_pointer(text, "text");
    require_pointer(bytes, "bytes");
    detokenizer->text.clear();
    detokenizer->detokenizer.flush(&detokenizer->text);
    *text = detokenizer->text.data();
    *bytes = detokenizer->text.size();
  });
}

edgec_status edgec_stop_matcher_create(const char* const* stop, int32_t stop_count, edgec_stop_matcher** matcher) {
  return guard([&] {
    require_pointer(matcher, "matcher");
    require_array(stop, stop_count, "stop");
    edgec::SamplingParams params;
    for (int32_t i = 0; i < stop_count; ++i) {
      require_pointer(stop[i], "a stop string");
      params.stop.emplace_back(stop[i]);
    }
    edgec::validate(params, 1);
    auto strings = std::make_shared<const edgec::StopStrings>(params.stop);
    *matcher = new edgec_stop_matcher{edgec::StopMatcher(std::move(strings)), {}};
  });
}

void edgec_stop_matcher_destroy(edgec_stop_matcher* matcher) { delete matcher; }

edgec_status edgec_stop_matcher_push(edgec_stop_matcher* matcher, const char* piece, size_t piece_bytes,
                                     const char** text, size_t* bytes, int32_t* stopped) {
  return guard([&] {
    require_pointer(matcher, "matcher");
    if (piece_bytes > 0) require_pointer(piece, "piece");
    require_pointer(text, "text");
    require_pointer(bytes, "bytes");
    require_pointer(stopped, "stopped");
    matcher->text.clear();
    *stopped = matcher->matcher.push({piece_bytes == 0 ? "" : piece, piece_bytes}, &matcher->text) ? 1 : 0;
    *text = matcher->text.data();
    *bytes = matcher->text.size();
  });
}

edgec_status edgec_stop_matcher_flush(edgec_stop_matcher* matcher, const char** text, size_t* bytes) {
  return guard([&] {
    require_pointer(matcher, "matcher");
    require_pointer(text, "text");
    require_pointer(bytes, "bytes");
    matcher->text.clear();
    matcher->matcher.flush(&matcher->text);
    *text = matcher->text.data();
    *bytes = matcher->text.size();
  });
}
