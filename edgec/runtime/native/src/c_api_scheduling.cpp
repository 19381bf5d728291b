// edgec_scheduling.h: pool, scheduler and simulator for the host.
#include <algorithm>
#include <string>
#include <vector>

#include "edgec_scheduling.h"
#include "scheduler.h"
#include "simulator.h"
#include "status.h"

using edgec::Error;
using edgec::guard;
using edgec::require;

struct edgec_pool {
  edgec::BlockPool pool;
};

struct edgec_scheduler {
  edgec::Scheduler scheduler;
  edgec::StepPlan plan;
  std::vector<edgec::BlockCopy> copies;
};

namespace {

uint64_t always_collides(uint64_t, const int32_t*, int32_t) { return 42; }

template <typename... Pointers>
void present(const Pointers*... pointers) {
  require(((pointers != nullptr) && ...), EDGEC_INVALID_ARGUMENT, "a null pointer");
}

void found(bool yes) { require(yes, EDGEC_NOT_FOUND, "no such sequence, or not in a state for this"); }

std::string text(const char* bytes, int32_t count) {
  require(count >= 0 && (count == 0 || bytes != nullptr), EDGEC_INVALID_ARGUMENT, "a key without bytes");
  return count == 0 ? std::string() : std::string(bytes, static_cast<size_t>(count));
}

std::vector<uint64_t> chain(const edgec::BlockPool& pool, const std::string& key, const int32_t* tokens,
                            int32_t blocks) {
  std::vector<uint64_t> hashes;
  uint64_t hash = pool.root_hash(key);
  for (int32_t i = 0; i < blocks; ++i) {
    hash = pool.extend(hash, tokens + static_cast<size_t>(i) * static_cast<size_t>(pool.block_size()));
    hashes.push_back(hash);
  }
  return hashes;
}

edgec::SchedulerConfig configured(const edgec_scheduler_options* o) {
  present(o);
  require(o->struct_size == sizeof *o, EDGEC_VERSION_MISMATCH, "edgec_scheduler_options has another size");
  edgec::SchedulerConfig config;
  config.blocks = o->blocks;
  config.block_size = o->block_size;
  config.first_block = o->first_block;
  config.context = o->context;
  config.max_batch = o->max_batch;
  config.step_tokens = o->step_tokens;
  config.max_waiting = o->max_waiting;
  config.aging_steps = o->aging_steps;
  config.static_batching = o->static_batching != 0;
  config.prefix_cache = o->prefix_cache != 0;
  config.step_slo = o->step_slo;
  config.hash = o->colliding != 0 ? always_collides : nullptr;
  return config;
}

void count_pool(const edgec::BlockPool& pool, edgec_pool_counts* counts) {
  const edgec::PoolCounts c = pool.counts();
  *counts = {c.total, c.free, c.cached, c.owned, c.owned_tokens};
}

void sound(const std::string& wrong) {
  if (!wrong.empty()) throw Error(EDGEC_INTERNAL, wrong);
}

}  // namespace

// ---- Block pool -----------------------------------------------------------------------------------------------------

edgec_status edgec_pool_create(int32_t blocks, int32_t block_size, int32_t first_block, int32_t colliding,
                               edgec_pool** pool) {
  return guard([&] {
    present(pool);
    *pool = new edgec_pool{edgec::BlockPool(blocks, block_size, first_block, colliding ? always_collides : nullptr)};
  });
}

void edgec_pool_destroy(edgec_pool* pool) { delete pool; }

edgec_status edgec_pool_allocate(edgec_pool* pool, int32_t* block) {
  return guard([&] {
    present(pool, block);
    *block = pool->pool.allocate().value_or(edgec::kNoBlock);
  });
}

edgec_status edgec_pool_retain(edgec_pool* pool, int32_t block) {
  return guard([&] {
    present(pool);
    pool->pool.retain(block);
  });
}

edgec_status edgec_pool_release(edgec_pool* pool, int32_t block) {
  return guard([&] {
    present(pool);
    pool->pool.release(block);
  });
}

edgec_status edgec_pool_make_writable(edgec_pool* pool, int32_t block, int32_t* own) {
  return guard([&] {
    present(pool, own);
    *own = pool->pool.make_writable(block).value_or(edgec::kNoBlock);
  });
}

edgec_status edgec_pool_publish(edgec_pool* pool, int32_t* table, int32_t blocks, const int32_t* tokens,
                                const char* key, int32_t key_bytes) {
  return guard([&] {
    present(pool, table, tokens);
    const std::string name = text(key, key_bytes);
    const std::vector<uint64_t> hashes = chain(pool->pool, name, tokens, blocks);
    uint64_t serial = 0;
    for (size_t i = 0; i < hashes.size(); ++i) {
      const int32_t* own = tokens + i * static_cast<size_t>(pool->pool.block_size());
      table[i] = pool->pool.publish(table[i], serial, hashes[i], own, name, &serial);
    }
  });
}

edgec_status edgec_pool_find(edgec_pool* pool, const int32_t* tokens, int32_t blocks, const char* key,
                             int32_t key_bytes, int32_t* table, int32_t* count) {
  return guard([&] {
    present(pool, tokens, table, count);
    const std::string name = text(key, key_bytes);
    std::vector<edgec::BlockId> hits;
    pool->pool.find_prefix(name, chain(pool->pool, name, tokens, blocks).data(), tokens, blocks, &hits);
    std::copy(hits.begin(), hits.end(), table);
    *count = static_cast<int32_t>(hits.size());
  });
}

edgec_status edgec_prefix_key_add(const char* key, int32_t key_bytes, const char* tag, const char* value,
                                  int32_t value_bytes, char* out, int32_t capacity, int32_t* count) {
  return guard([&] {
    present(tag, out, count);
    const std::string bytes = edgec::PrefixKey(text(key, key_bytes)).add(tag, text(value, value_bytes)).bytes();
    *count = static_cast<int32_t>(bytes.size());
    require(*count <= capacity, EDGEC_BUFFER_TOO_SMALL, "the key doesn't fit");
    std::copy(bytes.begin(), bytes.end(), out);
  });
}

edgec_status edgec_pool_trim(edgec_pool* pool) {
  return guard([&] {
    present(pool);
    pool->pool.trim();
  });
}

edgec_status edgec_pool_owners(edgec_pool* pool, int32_t block, int32_t* owners) {
  return guard([&] {
    present(pool, owners);
    *owners = pool->pool.owners(block);
  });
}

edgec_status edgec_pool_get_counts(const edgec_pool* pool, edgec_pool_counts* counts) {
  return guard([&] {
    present(pool, counts);
    count_pool(pool->pool, counts);
  });
}

edgec_status edgec_pool_verify(const edgec_pool* pool) {
  return guard([&] {
    present(pool);
    sound(pool->pool.verify());
  });
}

// ---- Scheduler ------------------------------------------------------------------------------------------------------

edgec_status edgec_scheduler_create(const edgec_scheduler_options* options, edgec_scheduler** scheduler) {
  return guard([&] {
    present(scheduler);
    *scheduler = new edgec_scheduler{edgec::Scheduler(configured(options)), {}, {}};
  });
}

void edgec_scheduler_destroy(edgec_scheduler* scheduler) { delete scheduler; }

edgec_status edgec_scheduler_add(edgec_scheduler* scheduler, const edgec_sequence_spec* spec, int32_t* admission) {
  return guard([&] {
    present(scheduler, spec, admission);
    require(spec->struct_size == sizeof *spec, EDGEC_VERSION_MISMATCH, "edgec_sequence_spec has another size");
    require(spec->count == 0 || spec->tokens != nullptr, EDGEC_INVALID_ARGUMENT, "a null pointer");
    edgec::SequenceSpec made;
    made.id = spec->id;
    made.prompt.assign(spec->tokens, spec->tokens + std::max(0, spec->count));
    made.priority = spec->priority;
    made.tenant = spec->tenant;
    made.weight = spec->weight;
    made.max_new_tokens = spec->max_new_tokens;
    made.compute_all = spec->compute_all != 0;
    made.cache_key = text(spec->key, spec->key_bytes);
    *admission = static_cast<int32_t>(scheduler->scheduler.add(made));
  });
}

edgec_status edgec_scheduler_cancel(edgec_scheduler* scheduler, uint64_t id) {
  return guard([&] {
    present(scheduler);
    found(scheduler->scheduler.cancel(id));
  });
}

edgec_status edgec_scheduler_finish(edgec_scheduler* scheduler, uint64_t id) {
  return guard([&] {
    present(scheduler);
    found(scheduler->scheduler.finish(id));
  });
}

edgec_status edgec_scheduler_preempt(edgec_scheduler* scheduler, uint64_t id) {
  return guard([&] {
    present(scheduler);
    found(scheduler->scheduler.preempt(id));
  });
}

edgec_status edgec_scheduler_preempt_all_but_one(edgec_scheduler* scheduler, int32_t* count) {
  return guard([&] {
    present(scheduler, count);
    *count = scheduler->scheduler.preempt_all_but_one();
  });
}

edgec_status edgec_scheduler_fork(edgec_scheduler* scheduler, uint64_t parent, uint64_t child, int32_t last_token) {
  return guard([&] {
    present(scheduler);
    found(scheduler->scheduler.fork(parent, child, last_token < 0 ? nullptr : &last_token));
  });
}

edgec_status edgec_scheduler_trim(edgec_scheduler* scheduler) {
  return guard([&] {
    present(scheduler);
    scheduler->scheduler.trim();
  });
}

edgec_status edgec_scheduler_set_draft(edgec_scheduler* scheduler, uint64_t id, const int32_t* tokens, int32_t count) {
  return guard([&] {
    present(scheduler);
    require(count >= 0 && (count == 0 || tokens != nullptr), EDGEC_INVALID_ARGUMENT, "a draft without tokens");
    scheduler->scheduler.set_draft(id, tokens, count);
  });
}

edgec_status edgec_scheduler_plan(edgec_scheduler* scheduler, edgec_plan* plan) {
  return guard([&] {
    present(scheduler, plan);
    edgec::StepPlan& made = scheduler->plan;
    scheduler->scheduler.plan(&made);
    *plan = {static_cast<int32_t>(made.chunks.size()),
             static_cast<int32_t>(made.starts.size()),
             static_cast<int32_t>(made.victims.size()),
             made.rows,
             made.padding,
             made.slots};
  });
}

edgec_status edgec_scheduler_get_plan(const edgec_scheduler* scheduler, edgec_chunk* chunks, uint64_t* starts,
                                      uint64_t* victims) {
  return guard([&] {
    present(scheduler, chunks, starts, victims);
    for (const edgec::Chunk& c : scheduler->plan.chunks) {
      *chunks++ = {c.sequence, c.start, c.count, c.drafts, c.samples};
    }
    for (const edgec::Start& start : scheduler->plan.starts) *starts++ = start.sequence;
    for (const edgec::SequenceId victim : scheduler->plan.victims) *victims++ = victim;
  });
}

edgec_status edgec_scheduler_reserve(edgec_scheduler* scheduler, int32_t* outcome, int32_t* copies) {
  return guard([&] {
    present(scheduler, outcome, copies);
    *outcome = static_cast<int32_t>(scheduler->scheduler.reserve(scheduler->plan, &scheduler->copies));
    *copies = static_cast<int32_t>(scheduler->copies.size());
  });
}

edgec_status edgec_scheduler_get_copies(const edgec_scheduler* scheduler, int32_t* from, int32_t* to) {
  return guard([&] {
    present(scheduler, from, to);
    for (const edgec::BlockCopy& copy : scheduler->copies) {
      *from++ = copy.from;
      *to++ = copy.to;
    }
  });
}

edgec_status edgec_scheduler_commit(edgec_scheduler* scheduler, const edgec_step_result* results, int32_t count,
                                    double seconds) {
  return guard([&] {
    present(scheduler);
    require(count >= 0 && (count == 0 || results != nullptr), EDGEC_INVALID_ARGUMENT, "a null pointer");
    std::vector<edgec::StepResult> made;
    for (int32_t i = 0; i < count; ++i) {
      made.push_back({results[i].sequence, results[i].tokens, results[i].count, results[i].finish != 0});
    }
    scheduler->scheduler.commit(scheduler->plan, made.data(), made.size(), seconds);
  });
}

edgec_status edgec_scheduler_release(edgec_scheduler* scheduler) {
  return guard([&] {
    present(scheduler);
    scheduler->scheduler.release(scheduler->plan);
  });
}

edgec_status edgec_scheduler_sequence(const edgec_scheduler* scheduler, uint64_t id, edgec_sequence_info* info) {
  return guard([&] {
    present(scheduler, info);
    const edgec::Scheduler& s = scheduler->scheduler;
    *info = {s.running(id),       s.length(id),          static_cast<int32_t>(s.tokens(id).size()),     s.room(id),
             s.cached_tokens(id), s.computed_before(id), static_cast<int32_t>(s.block_table(id).size())};
  });
}

edgec_status edgec_scheduler_contents(const edgec_scheduler* scheduler, uint64_t id, int32_t* tokens, int32_t* table) {
  return guard([&] {
    present(scheduler, tokens, table);
    const std::vector<int32_t>& own = scheduler->scheduler.tokens(id);
    const std::vector<edgec::BlockId>& blocks = scheduler->scheduler.block_table(id);
    std::copy(own.begin(), own.end(), tokens);
    std::copy(blocks.begin(), blocks.end(), table);
  });
}

edgec_status edgec_scheduler_get_stats(const edgec_scheduler* scheduler, edgec_scheduler_stats* stats) {
  return guard([&] {
    present(scheduler, stats);
    edgec::copy_stats(scheduler->scheduler, stats);
  });
}

edgec_status edgec_scheduler_pool(const edgec_scheduler* scheduler, edgec_pool_counts* counts) {
  return guard([&] {
    present(scheduler, counts);
    count_pool(scheduler->scheduler.pool(), counts);
  });
}

edgec_status edgec_scheduler_served(const edgec_scheduler* scheduler, uint64_t tenant, uint64_t* tokens) {
  return guard([&] {
    present(scheduler, tokens);
    const auto& tenants = scheduler->scheduler.queue().tenants();
    const auto at = tenants.find(tenant);
    *tokens = at == tenants.end() ? 0 : at->second.served;
  });
}

edgec_status edgec_scheduler_verify(const edgec_scheduler* scheduler) {
  return guard([&] {
    present(scheduler);
    sound(scheduler->scheduler.verify());
  });
}

// ---- Simulation -----------------------------------------------------------------------------------------------------

edgec_status edgec_simulate(const edgec_scheduler_options* options, const edgec_sim_cost* cost,
                            const edgec_sim_request* requests, int32_t count, edgec_sim_outcome* outcomes,
                            edgec_sim_report* report) {
  return guard([&] {
    present(cost, report);
    require(count >= 0 && (count == 0 || requests != nullptr), EDGEC_INVALID_ARGUMENT, "a null pointer");
    require(report->struct_size == sizeof *report, EDGEC_VERSION_MISMATCH, "edgec_sim_report has another size");
    edgec::simulate(configured(options), edgec::StepCost(*cost), requests, count, outcomes, report);
  });
}
