// Defaults, limits, and what the memory budget buys: everything an engine decides before it runs.
#include <cstdio>

#include "engine.h"
#include "status.h"

namespace edgec {
namespace {

constexpr int kMaxBatch = 64, kMaxStepTokens = 4096, kMaxThreads = 64;
// Tokenizer, requests, scheduler and thread stacks, which aren't counted one by one.
constexpr size_t kOverhead = size_t{24} << 20;

[[noreturn]] void refuse(const char* field, const std::string& why) {
  throw Error(EDGEC_INVALID_ARGUMENT, std::string("option ") + field + ": " + why);
}

int in_range(const char* field, int value, int otherwise, int least, int most) {
  if (value == 0) value = otherwise;
  if (value < least || value > most)
    refuse(field, std::to_string(value) + " is not in " + std::to_string(least) + "…" + std::to_string(most));
  return value;
}

std::string megabytes(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

const char* name_of(KvType type) { return type == KvType::kInt8 ? "int8" : type == KvType::kFp16 ? "fp16" : "fp32"; }

// Members of a JSON object, one after the other. Calls are not inlined: there are many, and each would be as long.
class ObjectWriter {
 public:
  __attribute__((noinline)) void add_value(const char* name, const std::string& json) {
    text_ += text_.empty() ? "{\"" : ", \"";
    text_ += name;
    text_ += "\": ";
    text_ += json;
  }
  __attribute__((noinline)) void add(const char* name, const std::string& text) {
    std::string quoted = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') quoted += '\\';
      if (static_cast<unsigned char>(c) >= 0x20) quoted += c;
    }
    add_value(name, quoted + '"');
  }
  void add(const char* name, const char* text) { add(name, std::string(text)); }
  __attribute__((noinline)) void add(const char* name, uint64_t value) { add_value(name, std::to_string(value)); }
  void add(const char* name, int32_t value) { add(name, static_cast<uint64_t>(value)); }
  std::string text() const { return text_ + "}"; }

 private:
  std::string text_;
};

}  // namespace

EngineConfig EngineConfig::resolve(const edgec_engine_options& options, const Manifest& manifest) {
  if (options.struct_size != sizeof(edgec_engine_options))
    throw Error(EDGEC_VERSION_MISMATCH,
                "edgec_engine_options has another size in this library; compile against its own "
                "edgec.h and use EDGEC_ENGINE_OPTIONS_INIT");
  EngineConfig c = {};
  c.threads = in_range("threads", options.threads, default_threads(), 1, kMaxThreads);
  c.block_size = in_range("block_size", options.block_size, manifest.block_size, 4, 64);
  if ((c.block_size & (c.block_size - 1)) != 0) refuse("block_size", "it must be 4, 8, 16, 32 or 64");
  c.context = in_range("context", options.context, manifest.context, 2, manifest.model.max_positions);
  c.max_batch = in_range("max_batch", options.max_batch, manifest.max_batch, 1, kMaxBatch);
  const int tokens = manifest.step_tokens > c.max_batch ? manifest.step_tokens : c.max_batch;
  c.step_tokens = in_range("step_tokens", options.step_tokens, tokens, c.max_batch, kMaxStepTokens);
  c.max_waiting = in_range("max_waiting", options.max_waiting, 256, 1, 1 << 20);
  c.aging_steps = in_range("aging_steps", options.aging_steps, 32, 1, 1 << 20);
  if (options.kv_dtype < EDGEC_KV_INT8 || options.kv_dtype > EDGEC_KV_FP32) refuse("kv_dtype", "it must be EDGEC_KV_*");
  c.kv = static_cast<KvType>(options.kv_dtype);
  if (c.kv == KvType::kInt8 && c.context > kMostInt8Positions)
    refuse("context", "of INT8 keys and values it is at most " + std::to_string(kMostInt8Positions) +
                          "; lower it, or take EDGEC_KV_FP16");
  if (options.batching != EDGEC_BATCHING_CONTINUOUS && options.batching != EDGEC_BATCHING_STATIC)
    refuse("batching", "it must be EDGEC_BATCHING_*");
  c.static_batching = options.batching == EDGEC_BATCHING_STATIC;
  c.prefix_cache = options.prefix_cache >= 0;
  c.memory_budget = options.memory_budget != 0 ? options.memory_budget : manifest.memory_budget;
  if (!(options.step_slo_ms >= 0.0 && options.step_slo_ms < 1e6)) refuse("step_slo_ms", "it must be in 0…1e6");
  c.step_slo = options.step_slo_ms / 1e3;
  c.kernel = options.kernel == nullptr ? "" : options.kernel;
  const bool head = !manifest.draft.widths.empty();
  const int32_t who = options.speculation;
  if (who < EDGEC_SPECULATION_AUTO || who > EDGEC_SPECULATION_BOTH)
    refuse("speculation", "it must be EDGEC_SPECULATION_*");
  if ((who == EDGEC_SPECULATION_HEAD || who == EDGEC_SPECULATION_BOTH) && !head)
    refuse("speculation", "the bundle has no draft head; build it with the pass `draft_head`, or take the n-grams");
  if (c.static_batching && who > EDGEC_SPECULATION_OFF)
    refuse("speculation", "it can't be combined with static batching");
  c.head_drafts = head && !c.static_batching && who != EDGEC_SPECULATION_OFF && who != EDGEC_SPECULATION_NGRAM;
  c.ngram_drafts = !c.static_batching && who != EDGEC_SPECULATION_OFF && who != EDGEC_SPECULATION_HEAD;
  if (options.draft_length < 0 || options.draft_length > kMostDrafts)
    refuse("draft_length", std::to_string(options.draft_length) + " is not in 1…8, or 0 for as many as pays");
  c.draft_length = options.draft_length;
  if (options.draft_width < 0 || options.draft_width > kWidestTree)
    refuse("draft_width", std::to_string(options.draft_width) + " is not in 1…4, or 0 for what suits draft_length");
  c.draft_width = options.draft_width > 0 ? options.draft_width : c.draft_length > 0 ? 1 : kWidestTree;
  c.log = options.log;
  c.thermal = options.thermal;
  c.user = options.user;
  return c;
}

int EngineConfig::draft_rows() const { return draft_width == 1 ? max_batch : std::max(max_batch, kLevelRows); }

Engine::Budget Engine::make_budget(const Safetensors& file) const {
  const Architecture& m = manifest_.model;
  const KvLayout kv = {config_.kv, config_.block_size, m.kv_heads, m.head_dim};
  Budget budget = {};
  budget.weights = Weights::packed_bytes(manifest_, file, kernels_);
  budget.scratch = kOverhead + Decoder::scratch_bytes(m, kv, config_.threads, config_.context, config_.step_tokens,
                                                      config_.max_batch < 16 ? 16 : config_.max_batch);
  if (config_.head_drafts) budget.scratch += DraftHead::scratch_bytes(manifest_, config_.draft_rows());
  budget.block = KvStore::bytes_per_block(kv, m.layers);
  const int64_t per_sequence = (config_.context + config_.block_size - 1) / config_.block_size;
  // One sequence of full length has to fit, and scratch blocks for what only fills a static batch up.
  const int64_t scratch_blocks = config_.static_batching ? (config_.step_tokens - 1) / config_.block_size + 1 : 1;
  const uint64_t least =
      budget.weights + budget.scratch + budget.block * static_cast<uint64_t>(per_sequence + scratch_blocks);
  if (least > config_.memory_budget)
    throw Error(EDGEC_OVER_BUDGET, "the memory budget is " + megabytes(config_.memory_budget) + ", and " +
                                       megabytes(least) + " is the least that works: weights " +
                                       megabytes(budget.weights) + ", scratch " + megabytes(budget.scratch) +
                                       ", one sequence of " + std::to_string(config_.context) +
                                       " tokens the rest; raise the budget, or lower the context");
  const uint64_t rest = config_.memory_budget - budget.weights - budget.scratch;
  int64_t blocks = static_cast<int64_t>(rest / budget.block) - scratch_blocks;
  // More than this can't be used: every sequence at full length, and as much again of cached prefixes.
  const int64_t most = 2 * per_sequence * config_.max_batch;
  budget.blocks = static_cast<int32_t>(blocks < most ? blocks : most);
  return budget;
}

std::string Engine::make_description() const {
  ObjectWriter memory;
  memory.add("weights", budget_.weights);
  memory.add("pools", budget_.block * static_cast<uint64_t>(store_->blocks()));
  memory.add("scratch", budget_.scratch);
  memory.add("budget", config_.memory_budget);
  std::string eos;
  for (const int32_t token : manifest_.eos) eos += (eos.empty() ? "" : ", ") + std::to_string(token);
  ObjectWriter all;
  all.add("name", manifest_.name);
  all.add("vocab_size", manifest_.model.vocab_size);
  all.add("hidden_size", manifest_.model.hidden_size);
  all.add("layers", manifest_.model.layers);
  all.add("context", config_.context);
  all.add("block_size", config_.block_size);
  all.add("blocks", budget_.blocks);
  all.add("first_block", scheduler_->config().first_block);
  all.add("max_batch", config_.max_batch);
  all.add("step_tokens", config_.step_tokens);
  all.add("max_waiting", config_.max_waiting);
  all.add("kernel", kernels_.name);
  all.add("threads", threads_->threads());
  all.add("kv_dtype", name_of(config_.kv));
  all.add("batching", config_.static_batching ? "static" : "continuous");
  all.add_value("prefix_cache", config_.prefix_cache ? "true" : "false");
  all.add("speculation", config_.head_drafts && config_.ngram_drafts ? "both"
                         : config_.head_drafts                       ? "head"
                         : config_.ngram_drafts                      ? "ngram"
                                                                     : "off");
  all.add("draft_length", config_.draft_length);
  all.add("draft_width", config_.draft_width);
  all.add("draft_bytes", weights_->read_per_draft());
  all.add_value("memory", memory.text());
  all.add("bytes_per_block", budget_.block);
  all.add("bytes_per_token_read", weights_->read_per_token());
  all.add_value("eos", "[" + eos + "]");
  return all.text();
}

}  // namespace edgec
