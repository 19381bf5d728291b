/* The scheduler without a model, for the host: tests drive pool and scheduler with an engine of their own, and
 * `edgec simulate` plans capacity. Apps don't need this header; edgec.h says how statuses and errors work.
 *
 * Everything is deterministic, and nothing here is safe for two threads at once.
 */
#ifndef EDGEC_SCHEDULING_H
#define EDGEC_SCHEDULING_H

#include "edgec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Block pool: src/block_pool.h -------------------------------------------------------------------------------- */

typedef struct edgec_pool edgec_pool;

typedef struct edgec_pool_counts {
  int32_t total, free, cached, owned;
  int64_t owned_tokens;
} edgec_pool_counts;

/* `colliding`: 1 gives every block the same hash, so that only comparing tokens tells prefixes apart. */
EDGEC_API edgec_status edgec_pool_create(int32_t blocks, int32_t block_size, int32_t first_block, int32_t colliding,
                                         edgec_pool** pool);
EDGEC_API void edgec_pool_destroy(edgec_pool* pool);
EDGEC_API edgec_status edgec_pool_allocate(edgec_pool* pool, int32_t* block); /* −1: none is left */
EDGEC_API edgec_status edgec_pool_retain(edgec_pool* pool, int32_t block);
EDGEC_API edgec_status edgec_pool_release(edgec_pool* pool, int32_t block);
EDGEC_API edgec_status edgec_pool_make_writable(edgec_pool* pool, int32_t block, int32_t* own); /* −1: none is left */
/* Publish `blocks` full blocks of tokens as a chain from the first on; equal ones are exchanged in `table`. */
EDGEC_API edgec_status edgec_pool_publish(edgec_pool* pool, int32_t* table, int32_t blocks, const int32_t* tokens,
                                          const char* key, int32_t key_bytes);
/* The longest published prefix of so many full blocks of tokens. `table` has room for all of them. */
EDGEC_API edgec_status edgec_pool_find(edgec_pool* pool, const int32_t* tokens, int32_t blocks, const char* key,
                                       int32_t key_bytes, int32_t* table, int32_t* found);
/* Append a part to a prefix key (`key`, may be empty): its tag, its length, its bytes. Needs 16 bytes and those of tag
 * and value besides the key's; writes at most `capacity` of them and their count. */
EDGEC_API edgec_status edgec_prefix_key_add(const char* key, int32_t key_bytes, const char* tag, const char* value,
                                            int32_t value_bytes, char* out, int32_t capacity, int32_t* count);
EDGEC_API edgec_status edgec_pool_trim(edgec_pool* pool);
EDGEC_API edgec_status edgec_pool_owners(edgec_pool* pool, int32_t block, int32_t* owners);
EDGEC_API edgec_status edgec_pool_get_counts(const edgec_pool* pool, edgec_pool_counts* counts);
EDGEC_API edgec_status edgec_pool_verify(const edgec_pool* pool); /* EDGEC_INTERNAL, and what is wrong as the message */

/* ---- Scheduler: src/scheduler.h ---------------------------------------------------------------------------------- */

typedef struct edgec_scheduler edgec_scheduler;

typedef struct edgec_scheduler_options {
  uint32_t struct_size;
  int32_t blocks, block_size, first_block, context, max_batch, step_tokens, max_waiting, aging_steps;
  int32_t static_batching, prefix_cache, colliding; /* 0 or 1 */
  double step_slo;                                  /* seconds; 0: no controller */
} edgec_scheduler_options;

enum { EDGEC_ADMITTED = 0, EDGEC_REFUSED_FULL = 1, EDGEC_REFUSED_TOO_LONG = 2, EDGEC_REFUSED_INVALID = 3 };

typedef struct edgec_sequence_spec {
  uint32_t struct_size;
  uint64_t id;
  const int32_t* tokens;
  int32_t count, priority;
  uint64_t tenant;
  double weight;
  int32_t max_new_tokens, compute_all;
  const char* key;
  int32_t key_bytes;
} edgec_sequence_spec;

typedef struct edgec_plan {
  int32_t chunks, starts, victims, rows, padding, slots;
} edgec_plan;

typedef struct edgec_chunk {
  uint64_t sequence;
  int32_t start, count, drafts, samples;
} edgec_chunk;

typedef struct edgec_step_result {
  uint64_t sequence;
  const int32_t* tokens;
  int32_t count, finish;
} edgec_step_result;

typedef struct edgec_sequence_info {
  int32_t running, length, tokens, room, cached_tokens, computed_before, blocks;
} edgec_sequence_info;

typedef struct edgec_scheduler_stats {
  int32_t waiting, running, batch_limit;
  uint64_t steps, retries, releases, preemptions, finished, cancelled;
  uint64_t prompt_tokens, cached_tokens, answer_tokens, computed_tokens, recomputed_tokens, rejected_tokens;
  uint64_t padding_rows, batch_slots, batch_used, kv_token_steps, kv_slot_steps, wait_steps, max_wait_steps;
  double fairness; /* Jain's index over the tenants while they competed */
} edgec_scheduler_stats;

EDGEC_API edgec_status edgec_scheduler_create(const edgec_scheduler_options* options, edgec_scheduler** scheduler);
EDGEC_API void edgec_scheduler_destroy(edgec_scheduler* scheduler);
EDGEC_API edgec_status edgec_scheduler_add(edgec_scheduler* scheduler, const edgec_sequence_spec* spec,
                                           int32_t* admission);
/* EDGEC_NOT_FOUND when there is no such sequence, or not in the state that it takes. */
EDGEC_API edgec_status edgec_scheduler_cancel(edgec_scheduler* scheduler, uint64_t id);
EDGEC_API edgec_status edgec_scheduler_finish(edgec_scheduler* scheduler, uint64_t id);
EDGEC_API edgec_status edgec_scheduler_preempt(edgec_scheduler* scheduler, uint64_t id);
EDGEC_API edgec_status edgec_scheduler_preempt_all_but_one(edgec_scheduler* scheduler, int32_t* count);
EDGEC_API edgec_status edgec_scheduler_fork(edgec_scheduler* scheduler, uint64_t parent, uint64_t child,
                                            int32_t last_token /* −1: the parent's own */);
EDGEC_API edgec_status edgec_scheduler_trim(edgec_scheduler* scheduler);
EDGEC_API edgec_status edgec_scheduler_set_draft(edgec_scheduler* scheduler, uint64_t id, const int32_t* tokens,
                                                 int32_t count);
/* A step. The plan is kept inside; `get_plan` and `get_copies` read it. */
EDGEC_API edgec_status edgec_scheduler_plan(edgec_scheduler* scheduler, edgec_plan* plan);
EDGEC_API edgec_status edgec_scheduler_get_plan(const edgec_scheduler* scheduler, edgec_chunk* chunks, uint64_t* starts,
                                                uint64_t* victims);
EDGEC_API edgec_status edgec_scheduler_reserve(edgec_scheduler* scheduler, int32_t* outcome, int32_t* copies);
EDGEC_API edgec_status edgec_scheduler_get_copies(const edgec_scheduler* scheduler, int32_t* from, int32_t* to);
EDGEC_API edgec_status edgec_scheduler_commit(edgec_scheduler* scheduler, const edgec_step_result* results,
                                              int32_t count, double seconds);
EDGEC_API edgec_status edgec_scheduler_release(edgec_scheduler* scheduler);
EDGEC_API edgec_status edgec_scheduler_sequence(const edgec_scheduler* scheduler, uint64_t id,
                                                edgec_sequence_info* info);
EDGEC_API edgec_status edgec_scheduler_contents(const edgec_scheduler* scheduler, uint64_t id, int32_t* tokens,
                                                int32_t* table); /* with room for what `sequence` says */
EDGEC_API edgec_status edgec_scheduler_get_stats(const edgec_scheduler* scheduler, edgec_scheduler_stats* stats);
EDGEC_API edgec_status edgec_scheduler_pool(const edgec_scheduler* scheduler, edgec_pool_counts* counts);
EDGEC_API edgec_status edgec_scheduler_served(const edgec_scheduler* scheduler, uint64_t tenant, uint64_t* tokens);
EDGEC_API edgec_status edgec_scheduler_verify(const edgec_scheduler* scheduler);

/* ---- Simulation: src/simulator.h --------------------------------------------------------------------------------- */

typedef struct edgec_sim_request {
  double arrival; /* seconds, ascending */
  int32_t prompt, answer;
  int32_t max_tokens; /* what the client allows; 0: until the context is full. The answer is cut there */
  int32_t priority;
  uint64_t tenant;
  double weight;
  uint64_t prefix;       /* requests of one prefix begin with the same … */
  int32_t prefix_tokens; /* … so many tokens */
} edgec_sim_request;

/* A step of r rows (padding among them) and s sequences takes fixed + per_row · r + per_sequence · s seconds; with a
 * table (ascending rows, at least two) what it says for r, straight between its points and beyond them, + per_sequence
 * · s. */
typedef struct edgec_sim_cost {
  double fixed, per_row, per_sequence;
  const double* table_rows;
  const double* table_seconds;
  int32_t table_count;
} edgec_sim_cost;

typedef struct edgec_sim_outcome {
  double first_token, finish; /* seconds since the start; −1: refused */
  double longest_gap;         /* between two of its tokens */
  int32_t answer;             /* tokens that it got */
  int32_t admission;          /* EDGEC_ADMITTED, or why not */
} edgec_sim_outcome;

typedef struct edgec_sim_report {
  uint32_t struct_size;
  int32_t refused;
  double seconds; /* from the first arrival to the last answer's end */
  double busy_seconds;
  double first_token_p50, first_token_p99; /* seconds from arrival */
  double gap_p50, gap_p99, gap_max;        /* seconds between tokens of one answer */
  double request_p50, request_p99;         /* seconds from arrival to the answer's end */
  double step_p50, step_p99;
  int32_t peak_blocks;
  edgec_scheduler_stats stats;
} edgec_sim_report;

/* Run all requests to their end. `outcomes` (one per request) may be NULL. */
EDGEC_API edgec_status edgec_simulate(const edgec_scheduler_options* options, const edgec_sim_cost* cost,
                                      const edgec_sim_request* requests, int32_t count, edgec_sim_outcome* outcomes,
                                      edgec_sim_report* report);

#ifdef __cplusplus
}
#endif

#endif /* EDGEC_SCHEDULING_H */
