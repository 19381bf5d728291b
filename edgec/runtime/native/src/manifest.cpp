#include "manifest.h"

#include "edgec.h"
#include "json.h"
#include "kernels/kernels.h"
#include "mapped_file.h"
#include "status.h"

namespace edgec {
namespace {

constexpr int kFormat = 1;

int number(const JsonValue& object, const char* key, int64_t least, int64_t most) {
  return static_cast<int>(object.at(key).as_int(least, most));
}

Architecture read_architecture(const JsonValue& json) {
  Architecture a = {};
  a.vocab_size = number(json, "vocab_size", 1, 1 << 20);
  a.hidden_size = number(json, "hidden_size", 1, 1 << 16);
  a.intermediate_size = number(json, "intermediate_size", 1, 1 << 18);
  a.layers = number(json, "layers", 1, 512);
  a.heads = number(json, "heads", 1, 512);
  a.kv_heads = number(json, "kv_heads", 1, 512);
  a.head_dim = number(json, "head_dim", 2, 1024);
  a.max_positions = number(json, "max_positions", 1, 1 << 24);
  a.norm_eps = static_cast<float>(json.at("norm_eps").as_double());
  a.rope_factor = static_cast<float>(json.get_double("rope_factor", 1.0));
  a.tied = json.at("tied").as_bool();
  if (a.heads % a.kv_heads != 0 || a.heads / a.kv_heads > 16 || a.head_dim % 2 != 0)
    throw Error(EDGEC_UNSUPPORTED, "the model has " + std::to_string(a.heads) + " heads of " +
                                       std::to_string(a.head_dim) + " over " + std::to_string(a.kv_heads) +
                                       " KV heads; up to 16 heads may share one, and the size must be even");
  return a;
}

DraftArchitecture read_draft(const JsonValue& json, int vocab) {
  DraftArchitecture draft;
  const std::string design(json.get_string("design", ""));
  if (design != "recurrent")
    throw Error(EDGEC_UNSUPPORTED,
                "the bundle has a draft head of design `" + design + "`; this library runs `recurrent`");
  for (const JsonValue width : json.at("widths").elements())
    draft.widths.push_back(static_cast<int>(width.as_int(1, 1 << 16)));
  if (draft.widths.empty() || draft.widths.size() > 8)
    throw Error(EDGEC_UNSUPPORTED, "a draft head has 1 to 8 blocks, this one " + std::to_string(draft.widths.size()));
  draft.vocab_size = number(json, "vocab", 1, vocab);
  return draft;
}

}  // namespace

Manifest Manifest::load(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const JsonDocument document = JsonDocument::parse(read_file(path, 1 << 20), path);
  const JsonValue root = document.root();
  const int64_t format = root.at("format").as_int(), abi = root.at("abi").as_int();
  if (format != kFormat || abi != EDGEC_ABI_VERSION)
    throw Error(EDGEC_VERSION_MISMATCH, path + " is of format " + std::to_string(format) + " for ABI " +
                                            std::to_string(abi) + ", this library has format " +
                                            std::to_string(kFormat) + " and ABI " + std::to_string(EDGEC_ABI_VERSION) +
                                            "; take both from one build");
  Manifest m = {};
  m.model = read_architecture(root.at("architecture"));
  if (root.has("draft")) m.draft = read_draft(root.at("draft"), m.model.vocab_size);
  m.name = std::string(root.get_string("name", "model"));
  const int64_t group = root.at("activation_group").as_int();
  if (group != kGroup)
    throw Error(EDGEC_VERSION_MISMATCH, path + ": activations were validated in groups of " + std::to_string(group) +
                                            ", this library uses " + std::to_string(kGroup));
  for (const JsonValue token : root.at("eos").elements())
    m.eos.push_back(static_cast<int32_t>(token.as_int(0, m.model.vocab_size - 1)));
  const JsonValue defaults = root.at("defaults");
  m.context = number(defaults, "context", 1, m.model.max_positions);
  m.block_size = number(defaults, "block_size", 4, 64);
  m.max_batch = number(defaults, "max_batch", 1, 64);
  m.step_tokens = number(defaults, "step_tokens", 1, 4096);
  m.memory_budget = static_cast<uint64_t>(defaults.at("memory_budget").as_int(1, int64_t{1} << 50));
  m.kv = std::string(defaults.get_string("kv", "int8"));
  m.model_bytes = static_cast<uint64_t>(root.at("files").at("model.safetensors").at("bytes").as_int());
  return m;
}

}  // namespace edgec
