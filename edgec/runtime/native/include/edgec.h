/* The C ABI of edgec's on-device runtime.
 *
 * A bundle (a folder that `edgec build` made for the target `native`) is opened as an engine; requests are submitted to
 * it; the host calls `edgec_engine_step` in a loop and drains events. Nothing here throws, aborts or prints: every
 * function that can fail returns an `edgec_status`, and `edgec_last_error` gives a line for people.
 *
 * Threads: one thread at a time may call `step`, `poll`, `trim` and `destroy` of an engine; `submit`, `cancel` and the
 * text functions may be called from any thread at any time. The engine runs its own worker threads inside `step` only.
 *
 * Versions: fill `struct_size` of every struct that has one with its sizeof (the `EDGEC_*_INIT` macros do), and check
 * `edgec_abi_version() == EDGEC_ABI_VERSION` once. A bundle whose manifest names another ABI is refused.
 *
 * Strings are UTF-8. A `const char*` with a length need not end in NUL.
 */
#ifndef EDGEC_H
#define EDGEC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define EDGEC_API __declspec(dllexport)
#else
#define EDGEC_API __attribute__((visibility("default")))
#endif

#define EDGEC_ABI_VERSION 1

/* ---- Results ------------------------------------------------------------------------------------------------- */

typedef int32_t edgec_status;
enum {
  EDGEC_OK = 0,
  EDGEC_INVALID_ARGUMENT = 1, /* a null pointer, a number out of range, options that can't be combined */
  EDGEC_NOT_FOUND = 2,        /* no such file, no such request */
  EDGEC_CORRUPT = 3,          /* a file that is truncated, inconsistent, or not what it says */
  EDGEC_UNSUPPORTED = 4,      /* valid, but not something this runtime does */
  EDGEC_VERSION_MISMATCH = 5, /* library, header and bundle don't belong together */
  EDGEC_OVER_BUDGET = 6,      /* the memory budget can't hold it; nothing was allocated */
  EDGEC_QUEUE_FULL = 7,       /* too many requests wait already */
  EDGEC_TOO_LONG = 8,         /* prompt and answer don't fit the context, or the whole pool */
  EDGEC_BUFFER_TOO_SMALL = 9, /* the needed size was written to the count */
  EDGEC_BUSY = 10,            /* called from two threads, or from inside a callback */
  EDGEC_IO = 11,              /* the operating system said no */
  EDGEC_INTERNAL = 12         /* a bug in the runtime */
};

EDGEC_API uint32_t edgec_abi_version(void);

/* The library's version and the kernels that were compiled in, for example "0.1.0 (avx2, avx512vnni, scalar)". */
EDGEC_API const char* edgec_version(void);

/* What went wrong in this thread's latest failed call; "" when none did. Valid until the thread's next call. */
EDGEC_API const char* edgec_last_error(void);

/* ---- Hooks --------------------------------------------------------------------------------------------------- */

enum { EDGEC_LOG_DEBUG = 0, EDGEC_LOG_INFO = 1, EDGEC_LOG_WARNING = 2, EDGEC_LOG_ERROR = 3 };
typedef void (*edgec_log_fn)(void* user, int32_t level, const char* line);

/* Asked before each step. 0: as fast as possible. 1–100: spend that share of the time idle, because the device is hot
 * (or on its last battery). Other values count as the nearest of these. */
typedef int32_t (*edgec_thermal_fn)(void* user);

/* ---- Engine -------------------------------------------------------------------------------------------------- */

typedef struct edgec_engine edgec_engine;

enum { EDGEC_KV_INT8 = 0, EDGEC_KV_FP16 = 1, EDGEC_KV_FP32 = 2 };
enum { EDGEC_BATCHING_CONTINUOUS = 0, EDGEC_BATCHING_STATIC = 1 };

/* Speculative decoding: who proposes tokens that one pass of the model then verifies. Without loss: at temperature 0
 * the tokens are those of plain decoding, above it their distribution is. */
enum {
  EDGEC_SPECULATION_AUTO = 0, /* n-grams, and the bundle's draft head, when it has one */
  EDGEC_SPECULATION_OFF = 1,
  EDGEC_SPECULATION_HEAD = 2,  /* refused when the bundle has no draft head */
  EDGEC_SPECULATION_NGRAM = 3, /* what followed the last time that the text ended as it ends now */
  EDGEC_SPECULATION_BOTH = 4   /* refused without a head */
};

/* Zero means "the default", or "the bundle's own value", for every field but those that say otherwise. */
typedef struct edgec_engine_options {
  uint32_t struct_size;
  int32_t threads;        /* 0: as many as there are fast cores, at most 8 */
  int32_t block_size;     /* tokens in a KV block: 4, 8, 16, 32 or 64 */
  int32_t context;        /* positions a sequence may have; at most what the model was trained for */
  int32_t max_batch;      /* sequences in a step, at most 64 */
  int32_t step_tokens;    /* token budget of a step: decodes first, the rest is prefill chunks */
  int32_t max_waiting;    /* requests that may wait before EDGEC_QUEUE_FULL */
  int32_t kv_dtype;       /* EDGEC_KV_*; INT8 is the default */
  int32_t batching;       /* EDGEC_BATCHING_* */
  int32_t prefix_cache;   /* 0: on; -1: off */
  int32_t aging_steps;    /* a waiting request gains one priority level after this many steps */
  uint64_t memory_budget; /* bytes for weights, KV pools and scratch together; 0: the bundle's */
  double step_slo_ms;     /* P99 step time that the batch controller keeps to; 0: no controller */
  const char* kernel;     /* NULL: the best for this CPU; else "scalar", "avx2", "avxvnni", "avx512vnni", "neon", … */
  edgec_log_fn log;       /* NULL: silence */
  edgec_thermal_fn thermal;
  void* user;           /* given to the callbacks */
  int32_t speculation;  /* EDGEC_SPECULATION_* */
  int32_t draft_length; /* tokens to propose, 1–8; 0: as many as pays, by measured acceptance and cost */
  int32_t draft_width;  /* the head's candidates for one place: 1, a chain that is drawn and verified by rejection
                           sampling; 2–4, a tree of up to 8 proposals in all, verified against the token that plain
                           decoding draws; 0: a chain when draft_length is fixed, else a tree */
} edgec_engine_options;
#define EDGEC_ENGINE_OPTIONS_INIT \
  { sizeof(edgec_engine_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, NULL, NULL, NULL, NULL, 0, 0, 0 }

/* Open a bundle's `native` folder. The budget is checked before weights are read. */
EDGEC_API edgec_status edgec_engine_create(const char* bundle, const edgec_engine_options* options,
                                           edgec_engine** engine);
EDGEC_API void edgec_engine_destroy(edgec_engine* engine);

/* What the engine settled on: JSON with vocab_size, context, block_size, blocks, max_batch, step_tokens, kernel,
 * threads, kv_dtype, memory {weights, pools, scratch, budget}, bytes_per_token_read, eos (a list). Valid until destroy.
 */
EDGEC_API const char* edgec_engine_describe(const edgec_engine* engine);

/* ---- Requests ------------------------------------------------------------------------------------------------ */

/* Whether the engine may speculate on a request. Trees and n-grams never change a token. A chain that the head draws
 * does above temperature 0 (not the tokens' distribution): how far it drafts depends on measured times and on who
 * shares the step. So by default it isn't drawn when such a request has a seed, which promises the same tokens again.
 */
enum { EDGEC_SPECULATE_DEFAULT = 0, EDGEC_SPECULATE_ALWAYS = 1, EDGEC_SPECULATE_NEVER = 2 };

typedef struct edgec_logit_bias {
  int32_t token;
  float bias;
} edgec_logit_bias;

typedef struct edgec_sampling {
  uint32_t struct_size;
  int32_t max_tokens;       /* tokens to generate at most; 0: until the context is full */
  float temperature;        /* 0: greedy */
  int32_t top_k;            /* 0: off */
  float top_p;              /* in (0, 1]; 1: off */
  float min_p;              /* in [0, 1); 0: off */
  float repetition_penalty; /* > 0; 1: off. Over prompt and answer (Keskar et al., 2019) */
  float frequency_penalty;  /* −2…2, over the answer, as in OpenAI's API */
  float presence_penalty;   /* −2…2, over the answer */
  uint64_t seed;            /* with `has_seed`; otherwise drawn from the request's id */
  int32_t has_seed;
  int32_t logprobs;   /* −1: none; 0–20: that many alternatives with each token's own */
  int32_t ignore_eos; /* generate past the end-of-sequence tokens */
  int32_t n;          /* sequences to sample; they share the prompt's blocks */
  const edgec_logit_bias* logit_bias;
  int32_t logit_bias_count;
  const char* const* stop; /* stop strings: not part of the answer, nor is anything after them */
  int32_t stop_count;      /* at most 16, each of at most 256 bytes */
  const int32_t* stop_tokens;
  int32_t stop_token_count;
  int32_t speculate; /* EDGEC_SPECULATE_* */
} edgec_sampling;
#define EDGEC_SAMPLING_INIT \
  { sizeof(edgec_sampling), 0, 1.0f, 0, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, 0, 0, -1, 0, 1, NULL, 0, NULL, 0, NULL, 0, 0 }

typedef struct edgec_request {
  uint32_t struct_size;
  const int32_t* tokens; /* the prompt, at least one token */
  int32_t token_count;
  int32_t priority;     /* greater goes first; −8…7 */
  uint64_t tenant;      /* tenants share the engine by weight, whatever they submit */
  float tenant_weight;  /* > 0; 0 means 1 */
  uint64_t cache_salt;  /* prefixes are shared only among equal salts */
  int32_t score_prompt; /* 1: also report the log-probability of each prompt token */
  edgec_sampling sampling;
} edgec_request;

/* Queue a request. Refused at once, with a reason, when it could never run. `id` is unique over the engine's life. */
EDGEC_API edgec_status edgec_engine_submit(edgec_engine* engine, const edgec_request* request, uint64_t* id);

/* Cancel in any state; its blocks are back within one step, and its last event has EDGEC_FINISH_CANCELLED. Cancelling a
 * request that has finished already is EDGEC_NOT_FOUND. */
EDGEC_API edgec_status edgec_engine_cancel(edgec_engine* engine, uint64_t id);

/* ---- Steps and events ---------------------------------------------------------------------------------------- */

enum {
  EDGEC_STEP_IDLE = 0,      /* nothing to do */
  EDGEC_STEP_COMMITTED = 1, /* tokens were computed and committed */
  EDGEC_STEP_DEFERRED = 2,  /* there is work, but no blocks for it now: only cancelling or finishing frees some */
  EDGEC_STEP_RETRY = 3,     /* the plan was released (a victim was preempted): step again */
  EDGEC_STEP_FAILED = 4     /* the engine's forward failed; the step was rolled back, the pool is whole */
};

/* Run one iteration: plan, reserve, run, commit. `outcome` is EDGEC_STEP_*. */
EDGEC_API edgec_status edgec_engine_step(edgec_engine* engine, int32_t* outcome);

enum {
  EDGEC_FINISH_NONE = 0,
  EDGEC_FINISH_STOP = 1,   /* an end-of-sequence token, a stop token or a stop string */
  EDGEC_FINISH_LENGTH = 2, /* max_tokens, or the context is full */
  EDGEC_FINISH_CANCELLED = 3,
  EDGEC_FINISH_FAILED = 4
};

typedef struct edgec_token_logprob {
  int32_t token;
  float logprob; /* natural logarithm, of the model's own distribution (before temperature and penalties) */
} edgec_token_logprob;

enum { EDGEC_EVENT_TOKEN = 0, EDGEC_EVENT_PROMPT_SCORE = 1, EDGEC_EVENT_FINISH = 2 };

/* One thing that happened. Pointers are valid until the next `poll` or `destroy`. */
typedef struct edgec_event {
  uint64_t request;
  int32_t sequence; /* 0 … n − 1 */
  int32_t kind;     /* EDGEC_EVENT_* */
  int32_t token;    /* TOKEN: the token; PROMPT_SCORE: the prompt's token at `position` */
  int32_t position; /* of the token in its sequence, from 0 */
  float logprob;    /* when asked for, else NaN. The first prompt token has none: NaN */
  int32_t finish;   /* FINISH: why */
  const char* text; /* TOKEN, FINISH: whole characters that became certain; may be empty */
  int32_t text_bytes;
  const edgec_token_logprob* top; /* the alternatives, most likely first */
  int32_t top_count;
  int32_t prompt_tokens; /* FINISH */
  int32_t cached_tokens; /* FINISH: prompt tokens whose keys and values were in the prefix cache */
  int32_t answer_tokens; /* FINISH: committed tokens, end-of-sequence not among them */
} edgec_event;

/* Move up to `capacity` events out, in the order they happened. */
EDGEC_API edgec_status edgec_engine_poll(edgec_engine* engine, edgec_event* events, int32_t capacity, int32_t* count);

/* ---- Memory and numbers -------------------------------------------------------------------------------------- */

enum {
  EDGEC_TRIM_CACHE = 0,   /* forget cached prefixes */
  EDGEC_TRIM_IDLE = 1,    /* and give unused pool pages and scratch back to the system */
  EDGEC_TRIM_CRITICAL = 2 /* and preempt everything but the request with the most work done */
};
EDGEC_API edgec_status edgec_engine_trim(edgec_engine* engine, int32_t level);

/* Counters since creation; "seconds" are wall time. */
typedef struct edgec_stats {
  uint32_t struct_size;
  int32_t waiting, running, blocks_total, blocks_free, blocks_cached, blocks_owned;
  int32_t batch_limit; /* B*, from the controller */
  int32_t kv_tokens;   /* tokens held in owned blocks: utilisation = kv_tokens / (blocks_owned · block_size) */
  uint64_t steps, retries, failures, preemptions, requests_finished, requests_cancelled;
  uint64_t prompt_tokens, cached_tokens, answer_tokens;
  uint64_t computed_tokens;   /* rows through the model */
  uint64_t recomputed_tokens; /* of these, because of preemption */
  uint64_t batch_slots;       /* sum over steps of the sequences that a step could have held */
  uint64_t batch_used;        /* sum over steps of those it held: occupancy = used / slots */
  double step_seconds;        /* whole steps */
  double forward_seconds;     /* inside the model */
  double sample_seconds;
  double step_p50_ms, step_p99_ms; /* of the latest 256 steps */
  uint64_t kv_token_steps;         /* sums over steps, for mean utilisation: tokens held … */
  uint64_t kv_slot_steps;          /* … and slots owned */
  uint64_t draft_reached[8];       /* of each place of a run: how often it had proposals that came to be verified, those
                                      before them being kept */
  uint64_t draft_kept[8];          /* and how often one of them was kept: α by place = kept / reached */
  uint64_t drafted_tokens;         /* proposals computed in passes; wasted are those that no `draft_kept` counts */
  uint64_t draft_places; /* lengths of the longest branches of proposals, one of each run: γ = places / runs */
  uint64_t draft_runs;   /* passes of a sequence that verified proposals */
  double draft_seconds;  /* in the draft head */
  int32_t draft_length;  /* proposals per sequence in the latest step that made any; 0: it doesn't pay */
} edgec_stats;
EDGEC_API edgec_status edgec_engine_stats(const edgec_engine* engine, edgec_stats* stats);

/* ---- Text ---------------------------------------------------------------------------------------------------- */

typedef struct edgec_tokenizer edgec_tokenizer;

/* From a tokenizer.json (byte-level BPE). */
EDGEC_API edgec_status edgec_tokenizer_create(const char* path, edgec_tokenizer** tokenizer);
EDGEC_API void edgec_tokenizer_destroy(edgec_tokenizer* tokenizer);

/* Text to tokens. `special`: 1 recognises special tokens written out in the text (a chat template's), 0 treats them as
 * text (what a user typed). Writes at most `capacity` tokens, and how many there are to `count`. */
EDGEC_API edgec_status edgec_tokenizer_encode(const edgec_tokenizer* tokenizer, const char* text, size_t bytes,
                                              int32_t special, int32_t* tokens, int32_t capacity, int32_t* count);

/* Tokens to bytes; `skip_special`: 1 leaves special tokens out. The bytes need not be valid UTF-8. */
EDGEC_API edgec_status edgec_tokenizer_decode(const edgec_tokenizer* tokenizer, const int32_t* tokens, int32_t count,
                                              int32_t skip_special, char* text, size_t capacity, size_t* bytes);
EDGEC_API int32_t edgec_tokenizer_vocab_size(const edgec_tokenizer* tokenizer);

/* The engine's own tokenizer; owned by the engine. */
EDGEC_API const edgec_tokenizer* edgec_engine_tokenizer(const edgec_engine* engine);

/* ---- The model alone ----------------------------------------------------------------------------------------- */

/* One pass of the model over rows that the caller placed himself, as in the paged step graph: row i is `tokens[i]` at
 * `positions[i]`, written to pool slot `slots[i]`, attending to the blocks in row `sequence[i]` of `block_tables`
 * (sequences × table_width). Logits (rows × vocab) and the last hidden states (rows × hidden) may be NULL. For parity
 * checks and tools; don't mix with requests on the same engine. */
EDGEC_API edgec_status edgec_engine_forward(edgec_engine* engine, const int32_t* tokens, const int32_t* positions,
                                            const int32_t* slots, const int32_t* sequence, int32_t rows,
                                            const int32_t* block_tables, int32_t sequences, int32_t table_width,
                                            float* logits, float* hidden);

#ifdef __cplusplus
}
#endif

#endif /* EDGEC_H */
