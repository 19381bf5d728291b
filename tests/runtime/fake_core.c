// A stand-in for the runtime's core: the functions of edgec.h over a "model" that repeats its prompt, so that the
// host's side is tested in milliseconds and without weights. Tokens are bytes; 256 is <|im_start|>, 257 <|im_end|> (the
// end).
//
// What it does on purpose: a prompt that begins with two bytes 1 makes its request fail, with two bytes 2 makes `step`
// return an error; a memory budget of one byte is refused; a step lasts $FAKE_STEP_US microseconds.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "edgec.h"

enum { kStart = 256, kEnd = 257, kVocab = 258, kMaxRequests = 64, kMaxSequences = 8, kMaxEvents = 4096, kMaxTop = 20 };

typedef struct {
  int32_t open, made, pending_bytes;
  char pending[8];
} Sequence;

typedef struct {
  uint64_t id;
  int32_t used, started, cancelled, scored;
  int32_t *prompt, count;
  edgec_sampling sampling;
  char stop[16];
  int32_t score_prompt;
  Sequence sequences[kMaxSequences];
} Slot;

typedef struct {
  edgec_event event;
  char text[16];
  edgec_token_logprob top[kMaxTop];
} Kept;

struct edgec_engine {
  pthread_mutex_t lock;
  Slot slots[kMaxRequests];
  Kept events[kMaxEvents], given[kMaxEvents];
  int32_t event_count, context, max_batch, max_waiting;
  uint64_t next_id;
  edgec_stats stats;
  char description[512];
  edgec_log_fn log;
  edgec_thermal_fn thermal;
  void* user;
};

static __thread char g_error[256];

static edgec_status fail(edgec_status status, const char* message) {
  snprintf(g_error, sizeof g_error, "%s", message);
  return status;
}

#ifndef FAKE_ABI_VERSION
#define FAKE_ABI_VERSION EDGEC_ABI_VERSION
#endif
uint32_t edgec_abi_version(void) { return FAKE_ABI_VERSION; }
const char* edgec_version(void) { return "0.0 (fake)"; }
const char* edgec_last_error(void) { return g_error; }

edgec_status edgec_engine_create(const char* bundle, const edgec_engine_options* options, edgec_engine** engine) {
  if (options->struct_size != sizeof *options) return fail(EDGEC_VERSION_MISMATCH, "options of another size");
  if (options->memory_budget == 1) return fail(EDGEC_OVER_BUDGET, "134 MB do not fit a budget of 1 byte");
  if (options->kernel && strcmp(options->kernel, "scalar") != 0) return fail(EDGEC_UNSUPPORTED, "no such kernel");
  edgec_engine* made = calloc(1, sizeof *made);
  pthread_mutex_init(&made->lock, NULL);
  made->context = options->context ? options->context : 512;
  made->max_batch = options->max_batch ? options->max_batch : 4;
  made->max_waiting = options->max_waiting ? options->max_waiting : 32;
  made->log = options->log;
  made->thermal = options->thermal;
  made->user = options->user;
  snprintf(made->description, sizeof made->description,
           "{\"vocab_size\": %d, \"context\": %d, \"block_size\": 16, \"blocks\": 64, \"max_batch\": %d, \"kernel\": "
           "\"fake\", \"threads\": 1, \"kv_dtype\": \"int8\", \"bytes_per_token_read\": 1000, \"eos\": [%d], "
           "\"prefix_cache\": %s, \"memory\": {\"weights\": 1, \"pools\": 2, \"scratch\": 3, \"budget\": 6}}",
           kVocab, made->context, made->max_batch, kEnd, options->prefix_cache < 0 ? "false" : "true");
  if (made->log) made->log(made->user, EDGEC_LOG_INFO, bundle);
  made->stats.blocks_total = made->stats.blocks_free = 64;
  made->stats.batch_limit = made->max_batch;
  *engine = made;
  return EDGEC_OK;
}

void edgec_engine_destroy(edgec_engine* engine) {
  for (int i = 0; i < kMaxRequests; ++i)
    if (engine->slots[i].used) free(engine->slots[i].prompt);
  free(engine);
}

const char* edgec_engine_describe(const edgec_engine* engine) { return engine->description; }

static edgec_status submit(edgec_engine* engine, const edgec_request* request, uint64_t* id) {
  const edgec_sampling* sampling = &request->sampling;
  if (request->struct_size != sizeof *request || sampling->struct_size != sizeof *sampling)
    return fail(EDGEC_VERSION_MISMATCH, "a request of another size");
  if (request->token_count < 1) return fail(EDGEC_INVALID_ARGUMENT, "the prompt is empty");
  if (sampling->temperature < 0) return fail(EDGEC_INVALID_ARGUMENT, "temperature: must not be negative");
  if (sampling->n < 1 || sampling->n > kMaxSequences) return fail(EDGEC_INVALID_ARGUMENT, "n: must be 1 to 8");
  if (request->token_count >= engine->context) return fail(EDGEC_TOO_LONG, "the prompt does not fit the context");
  int32_t waiting = 0;
  Slot* slot = NULL;
  for (int i = 0; i < kMaxRequests; ++i) {
    if (!engine->slots[i].used && !slot) slot = &engine->slots[i];
    waiting += engine->slots[i].used && !engine->slots[i].started;
  }
  if (!slot || waiting >= engine->max_waiting) return fail(EDGEC_QUEUE_FULL, "32 requests wait already");
  memset(slot, 0, sizeof *slot);
  slot->used = 1;
  slot->id = *id = ++engine->next_id;
  slot->count = request->token_count;
  slot->prompt = malloc(sizeof(int32_t) * (size_t)slot->count);
  memcpy(slot->prompt, request->tokens, sizeof(int32_t) * (size_t)slot->count);
  slot->sampling = *sampling;
  slot->score_prompt = request->score_prompt;
  if (sampling->stop_count > 0) snprintf(slot->stop, sizeof slot->stop, "%s", sampling->stop[0]);
  for (int i = 0; i < sampling->n; ++i) slot->sequences[i].open = 1;
  return EDGEC_OK;
}

edgec_status edgec_engine_submit(edgec_engine* engine, const edgec_request* request, uint64_t* id) {
  pthread_mutex_lock(&engine->lock);
  edgec_status status = submit(engine, request, id);
  pthread_mutex_unlock(&engine->lock);
  return status;
}

edgec_status edgec_engine_cancel(edgec_engine* engine, uint64_t id) {
  edgec_status status = EDGEC_NOT_FOUND;
  pthread_mutex_lock(&engine->lock);
  for (int i = 0; i < kMaxRequests; ++i)
    if (engine->slots[i].used && engine->slots[i].id == id) {
      engine->slots[i].cancelled = 1;
      status = EDGEC_OK;
    }
  pthread_mutex_unlock(&engine->lock);
  return status == EDGEC_OK ? status : fail(status, "no such request");
}

static Kept* add_event(edgec_engine* engine, const Slot* slot, int32_t sequence, int32_t kind) {
  Kept* kept = &engine->events[engine->event_count < kMaxEvents - 1 ? engine->event_count++ : kMaxEvents - 1];
  memset(kept, 0, sizeof *kept);
  kept->event.request = slot->id;
  kept->event.sequence = sequence;
  kept->event.kind = kind;
  kept->event.token = -1;
  kept->event.logprob = NAN;
  return kept;
}

static void score(const Slot* slot, Kept* kept, int32_t token) {
  if (slot->sampling.logprobs < 0) return;
  kept->event.logprob = -0.25f * (float)(1 + token % 4);
  kept->event.top_count = slot->sampling.logprobs;
  for (int i = 0; i < slot->sampling.logprobs; ++i) {
    kept->top[i].token = (token + i) % kVocab;
    kept->top[i].logprob = kept->event.logprob - (float)i;
  }
}

static void finish(edgec_engine* engine, Slot* slot, int32_t sequence, int32_t why) {
  Sequence* s = &slot->sequences[sequence];
  Kept* kept = add_event(engine, slot, sequence, EDGEC_EVENT_FINISH);
  kept->event.finish = why;
  kept->event.prompt_tokens = slot->count;
  kept->event.answer_tokens = s->made;
  if (s->pending_bytes) {  // an unfinished character becomes U+FFFD
    memcpy(kept->text, "\xef\xbf\xbd", 3);
    kept->event.text_bytes = 3;
  }
  s->open = 0;
  engine->stats.answer_tokens += (uint64_t)s->made;
}

// How many bytes the character that `first` begins has.
static int32_t width(unsigned char first) { return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4; }

static void advance(edgec_engine* engine, Slot* slot, int32_t sequence) {
  Sequence* s = &slot->sequences[sequence];
  int32_t index = s->made;
  int32_t token = slot->prompt[index % slot->count];
  if (token >= kStart) token = ' ';
  if (index >= slot->count && !slot->sampling.ignore_eos) {
    finish(engine, slot, sequence, EDGEC_FINISH_STOP);
    return;
  }
  if (slot->stop[0] && token == (unsigned char)slot->stop[0]) {
    finish(engine, slot, sequence, EDGEC_FINISH_STOP);
    return;
  }
  Kept* kept = add_event(engine, slot, sequence, EDGEC_EVENT_TOKEN);
  kept->event.token = token;
  kept->event.position = slot->count + index;
  score(slot, kept, token);
  s->pending[s->pending_bytes++] = (char)token;
  if (s->pending_bytes >= width((unsigned char)s->pending[0])) {
    memcpy(kept->text, s->pending, (size_t)s->pending_bytes);
    kept->event.text_bytes = s->pending_bytes;
    s->pending_bytes = 0;
  }
  ++s->made;
  if (s->made == slot->sampling.max_tokens || slot->count + s->made >= engine->context)
    finish(engine, slot, sequence, EDGEC_FINISH_LENGTH);
}

edgec_status edgec_engine_step(edgec_engine* engine, int32_t* outcome) {
  const char* us = getenv("FAKE_STEP_US");
  if (us) usleep((useconds_t)atoi(us));
  int32_t idle = engine->thermal ? engine->thermal(engine->user) : 0;
  pthread_mutex_lock(&engine->lock);
  int32_t batch = 0;
  *outcome = EDGEC_STEP_IDLE;
  engine->stats.failures += idle > 100;  // so that a test sees that it was asked
  for (int i = 0; i < kMaxRequests; ++i) {
    Slot* slot = &engine->slots[i];
    if (!slot->used) continue;
    int32_t open = 0, twice = slot->count > 1 && slot->prompt[0] == slot->prompt[1] ? slot->prompt[0] : 0;
    if (twice == 2) {
      pthread_mutex_unlock(&engine->lock);
      return fail(EDGEC_INTERNAL, "the prompt had bytes 2");
    }
    if (slot->cancelled || twice == 1) {
      for (int k = 0; k < slot->sampling.n; ++k)
        if (slot->sequences[k].open)
          finish(engine, slot, k, slot->cancelled ? EDGEC_FINISH_CANCELLED : EDGEC_FINISH_FAILED);
      ++engine->stats.requests_cancelled;
      *outcome = slot->cancelled ? EDGEC_STEP_COMMITTED : EDGEC_STEP_FAILED;
      free(slot->prompt);
      slot->used = 0;
      continue;
    }
    if (batch + slot->sampling.n > engine->max_batch) continue;
    if (!slot->started) {
      engine->stats.prompt_tokens += (uint64_t)slot->count;
      for (int t = 0; slot->score_prompt && t < slot->count; ++t) {
        Kept* kept = add_event(engine, slot, 0, EDGEC_EVENT_PROMPT_SCORE);
        kept->event.token = slot->prompt[t];
        kept->event.position = t;
        if (t > 0) score(slot, kept, slot->prompt[t]);
      }
    }
    slot->started = 1;
    *outcome = EDGEC_STEP_COMMITTED;
    for (int k = 0; k < slot->sampling.n; ++k)
      if (slot->sequences[k].open) {
        advance(engine, slot, k);
        ++batch;
        open += slot->sequences[k].open;
      }
    if (!open) {
      ++engine->stats.requests_finished;
      free(slot->prompt);
      slot->used = 0;
    }
  }
  int32_t waiting = 0, running = 0;
  for (int i = 0; i < kMaxRequests; ++i) {
    waiting += engine->slots[i].used && !engine->slots[i].started;
    running += engine->slots[i].used && engine->slots[i].started;
  }
  engine->stats.waiting = waiting;
  engine->stats.running = running;
  if (batch) {
    ++engine->stats.steps;
    engine->stats.batch_slots += (uint64_t)engine->max_batch;
    engine->stats.batch_used += (uint64_t)batch;
    engine->stats.computed_tokens += (uint64_t)batch;
    engine->stats.kv_token_steps += (uint64_t)batch * 15;
    engine->stats.kv_slot_steps += (uint64_t)batch * 16;
    engine->stats.step_seconds += 1e-3;
    engine->stats.forward_seconds += 0.9e-3;
    engine->stats.sample_seconds += 0.05e-3;
  }
  pthread_mutex_unlock(&engine->lock);
  return EDGEC_OK;
}

edgec_status edgec_engine_poll(edgec_engine* engine, edgec_event* events, int32_t capacity, int32_t* count) {
  pthread_mutex_lock(&engine->lock);
  int32_t taken = engine->event_count < capacity ? engine->event_count : capacity;
  for (int i = 0; i < kMaxEvents; ++i) memset(engine->given[i].text, '#', sizeof engine->given[i].text);
  for (int i = 0; i < taken; ++i) {
    engine->given[i] = engine->events[i];
    engine->given[i].event.text = engine->given[i].text;
    engine->given[i].event.top = engine->given[i].top;
    events[i] = engine->given[i].event;
  }
  engine->event_count -= taken;
  memmove(engine->events, engine->events + taken, sizeof(Kept) * (size_t)engine->event_count);
  *count = taken;
  pthread_mutex_unlock(&engine->lock);
  return EDGEC_OK;
}

edgec_status edgec_engine_trim(edgec_engine* engine, int32_t level) {
  engine->stats.preemptions += (uint64_t)level;
  return EDGEC_OK;
}

edgec_status edgec_engine_stats(const edgec_engine* engine, edgec_stats* stats) {
  if (stats->struct_size != sizeof *stats) return fail(EDGEC_VERSION_MISMATCH, "statistics of another size");
  *stats = engine->stats;
  return EDGEC_OK;
}

const edgec_tokenizer* edgec_engine_tokenizer(const edgec_engine* engine) { return (const edgec_tokenizer*)engine; }
edgec_status edgec_tokenizer_create(const char* path, edgec_tokenizer** tokenizer) {
  (void)path, (void)tokenizer;
  return fail(EDGEC_UNSUPPORTED, "the fake has no tokenizer of its own");
}
void edgec_tokenizer_destroy(edgec_tokenizer* tokenizer) { (void)tokenizer; }
int32_t edgec_tokenizer_vocab_size(const edgec_tokenizer* tokenizer) { return (void)tokenizer, kVocab; }

edgec_status edgec_tokenizer_encode(const edgec_tokenizer* tokenizer, const char* text, size_t bytes, int32_t special,
                                    int32_t* tokens, int32_t capacity, int32_t* count) {
  (void)tokenizer;
  int32_t made = 0;
  for (size_t i = 0; i < bytes; ++made) {
    int32_t token = (unsigned char)text[i];
    size_t used = 1;
    if (special && bytes - i >= 12 && memcmp(text + i, "<|im_start|>", 12) == 0) token = kStart, used = 12;
    if (special && bytes - i >= 10 && memcmp(text + i, "<|im_end|>", 10) == 0) token = kEnd, used = 10;
    if (made < capacity) tokens[made] = token;
    i += used;
  }
  *count = made;
  return made <= capacity ? EDGEC_OK : fail(EDGEC_BUFFER_TOO_SMALL, "the buffer is too small");
}

edgec_status edgec_tokenizer_decode(const edgec_tokenizer* tokenizer, const int32_t* tokens, int32_t count,
                                    int32_t skip_special, char* text, size_t capacity, size_t* bytes) {
  (void)tokenizer;
  size_t made = 0;
  for (int32_t i = 0; i < count; ++i) {
    char byte = (char)tokens[i];
    const char* piece = tokens[i] == kStart ? "<|im_start|>" : tokens[i] == kEnd ? "<|im_end|>" : &byte;
    size_t length = tokens[i] == kStart ? 12 : tokens[i] == kEnd ? 10 : 1;
    if (tokens[i] < 0 || tokens[i] >= kVocab) return fail(EDGEC_INVALID_ARGUMENT, "no such token");
    if (tokens[i] >= kStart && skip_special) continue;
    if (made + length <= capacity) memcpy(text + made, piece, length);
    made += length;
  }
  *bytes = made;
  return made <= capacity ? EDGEC_OK : fail(EDGEC_BUFFER_TOO_SMALL, "the buffer is too small");
}

edgec_status edgec_engine_forward(edgec_engine* engine, const int32_t* tokens, const int32_t* positions,
                                  const int32_t* slots, const int32_t* sequence, int32_t rows,
                                  const int32_t* block_tables, int32_t sequences, int32_t table_width, float* logits,
                                  float* hidden) {
  (void)engine;
  for (int32_t r = 0; r < rows; ++r) {
    if (sequence[r] < 0 || sequence[r] >= sequences) return fail(EDGEC_INVALID_ARGUMENT, "no such sequence");
    for (int32_t v = 0; logits && v < kVocab; ++v)
      logits[r * kVocab + v] = (float)(tokens[r] * 1000 + v + block_tables[sequence[r] * table_width]);
    if (hidden) hidden[r * 2] = (float)positions[r], hidden[r * 2 + 1] = (float)slots[r];
  }
  return EDGEC_OK;
}
