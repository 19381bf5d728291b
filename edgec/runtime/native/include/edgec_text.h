/* The text rooms alone, for tests and tools on the host: sampler, random numbers, detokenizer, stop strings.
 *
 * Not part of the ABI that an app uses: inside an engine these run by themselves. Errors as in edgec.h. */
#ifndef EDGEC_TEXT_H
#define EDGEC_TEXT_H

#include "edgec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Random numbers (src/philox.h) ---------------------------------------------------------------------------- */

/* Philox4x32-10 of one counter. */
EDGEC_API void edgec_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Uniform in [0, 1). draw: 0 the token, 1 a draft's token, 2 its acceptance, 3 the token after a rejection. */
EDGEC_API double edgec_uniform(uint64_t seed, uint32_t sequence, uint32_t position, uint32_t draw);
/* What a token is drawn by: of all tokens the one with the least noise ÷ weight comes. Exponentially distributed. */
EDGEC_API double edgec_noise(uint64_t seed, uint32_t sequence, uint32_t position, int32_t token);

/* ---- Sampler (src/sampler.h) ---------------------------------------------------------------------------------- */

/* A row of logits and what came before it in its sequence. */
typedef struct edgec_sampler_input {
  uint32_t struct_size;
  const float* logits; /* (vocab) */
  int32_t vocab;
  const int32_t* prompt;
  int32_t prompt_count;
  const int32_t* answer;
  int32_t answer_count;
  uint64_t seed; /* the sampling's own is not looked at */
  uint32_t sequence, position;
} edgec_sampler_input;

typedef struct edgec_sampler_output {
  int32_t bad_logits; /* 1: NaN or infinite, and nothing else here counts */
  int32_t token;
  float logprob; /* NaN unless sampling->logprobs >= 0 */
  int32_t top_count;
  edgec_token_logprob top[20];
} edgec_sampler_output;

/* Scratch, used again and again, as by an engine for all rows of its steps. */
typedef struct edgec_sampler edgec_sampler;
EDGEC_API edgec_status edgec_sampler_create(edgec_sampler** sampler);
EDGEC_API void edgec_sampler_destroy(edgec_sampler* sampler);

EDGEC_API edgec_status edgec_sampler_sample(edgec_sampler* sampler, const edgec_sampler_input* input,
                                            const edgec_sampling* sampling, edgec_sampler_output* output);

/* The processed distribution: tokens with a probability above 0, ascending by id, and how many there are (0 for bad
 * logits). EDGEC_BUFFER_TOO_SMALL when `capacity` is less; `vocab` is always enough. */
EDGEC_API edgec_status edgec_sampler_probabilities(edgec_sampler* sampler, const edgec_sampler_input* input,
                                                   const edgec_sampling* sampling, int32_t* tokens,
                                                   double* probabilities, int32_t capacity, int32_t* count);

/* Whether an engine with this vocabulary would take these options. */
EDGEC_API edgec_status edgec_sampling_check(const edgec_sampling* sampling, int32_t vocab);

/* ---- Detokenizer (src/detokenizer.h) -------------------------------------------------------------------------- */

typedef struct edgec_detokenizer edgec_detokenizer;

/* The tokenizer must outlive it. */
EDGEC_API edgec_status edgec_detokenizer_create(const edgec_tokenizer* tokenizer, int32_t skip_special,
                                                edgec_detokenizer** detokenizer);
EDGEC_API void edgec_detokenizer_destroy(edgec_detokenizer* detokenizer);

/* The whole characters that `token` completed; `text` is valid until the next call. */
EDGEC_API edgec_status edgec_detokenizer_push(edgec_detokenizer* detokenizer, int32_t token, const char** text,
                                              size_t* bytes);
EDGEC_API edgec_status edgec_detokenizer_flush(edgec_detokenizer* detokenizer, const char** text, size_t* bytes);

/* ---- Stop strings (src/stop_strings.h) ------------------------------------------------------------------------ */

typedef struct edgec_stop_matcher edgec_stop_matcher;

EDGEC_API edgec_status edgec_stop_matcher_create(const char* const* stop, int32_t stop_count,
                                                 edgec_stop_matcher** matcher);
EDGEC_API void edgec_stop_matcher_destroy(edgec_stop_matcher* matcher);

/* What became certain of the text so far, whole characters in; `stopped`: 1 from the first stop string on. */
EDGEC_API edgec_status edgec_stop_matcher_push(edgec_stop_matcher* matcher, const char* piece, size_t piece_bytes,
                                               const char** text, size_t* bytes, int32_t* stopped);
EDGEC_API edgec_status edgec_stop_matcher_flush(edgec_stop_matcher* matcher, const char** text, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* EDGEC_TEXT_H */
