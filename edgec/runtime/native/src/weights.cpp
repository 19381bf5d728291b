#include "weights.h"

#include <cstring>
#include <functional>
#include <memory>

#include "status.h"

namespace edgec {
namespace {

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// One layer of the file, or some of its outputs: its name without `.weight`, how many, and from which on of how many.
struct Source {
  std::string name;
  int n;
  int first = 0, of = n;
};

std::string layer_name(int layer, const char* rest) { return "layers." + std::to_string(layer) + "." + rest; }

bool is_int8(const Safetensors& file, const std::string& name) {
  const Tensor* tensor = file.find(name + ".weight");
  if (tensor == nullptr) throw Error(EDGEC_CORRUPT, "the model has no tensor " + name + ".weight");
  return tensor->dtype == DType::kInt8;
}

// Neighbouring sources of one type become one part.
std::vector<std::vector<Source>> group_by_type(const Safetensors& file, const std::vector<Source>& sources) {
  std::vector<std::vector<Source>> groups;
  for (const Source& source : sources) {
    if (groups.empty() || is_int8(file, groups.back().front().name) != is_int8(file, source.name)) groups.push_back({});
    groups.back().push_back(source);
  }
  return groups;
}

}  // namespace

// Lays everything out in one arena. Run twice: without an arena it only counts.
class Weights::Packer {
 public:
  Packer(const Safetensors& file, const Kernels& kernels, uint8_t* base)
      : file_(file), layout_(kernels.layout), base_(base) {}

  size_t used() const { return used_; }

  // Gates and their ups, `down` being the layer that takes their products.
  Linear gate_up(const Source& gate, const Source& up, int k, const std::string& down) {
    const bool int8 = is_int8(file_, gate.name) && is_int8(file_, up.name) && is_int8(file_, down);
    return linear({gate, up}, k, int8 && gate.n % kGroup == 0 && kGroup % layout_.block == 0);
  }

  Linear linear(const std::vector<Source>& sources, int k, bool interleaved = false) {
    Linear linear;
    linear.interleaved = interleaved;
    linear.k = k;
    linear.padded = round_up(k, kGroup);
    for (const std::vector<Source>& group : group_by_type(file_, sources)) {
      const bool int8 = is_int8(file_, group.front().name);
      Linear::Part part = int8 ? pack_int8(group, k, linear.padded, interleaved) : pack_float(group, k);
      part.offset = linear.n;
      part.is_float = !int8;
      linear.has_int8 = linear.has_int8 || int8;
      linear.has_float = linear.has_float || !int8;
      linear.n += int8 ? part.int8.n : part.floats.n;
      linear.parts.push_back(part);
    }
    return linear;
  }

  const float* floats(const std::string& name, int count) {
    const Tensor& tensor = file_.get(name, DType::kFloat32, {count});
    float* to = take<float>(count);
    if (to != nullptr) std::memcpy(to, tensor.data, sizeof(float) * count);
    return to;
  }

  template <typename T>
  T* take(size_t count) {
    const size_t offset = used_;
    used_ += aligned(count * sizeof(T));
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }

  // Copying is put off, so that threads can share it.
  std::vector<std::function<void()>> jobs;

 private:
  // Where output i of two layers of n / 2 outputs each goes: groups of them by turns.
  static int interleaved_place(int i, int n) {
    const int half = n / 2, own = i % half;
    return own / kGroup * 2 * kGroup + i / half * kGroup + own % kGroup;
  }

  // (n) floats of all sources, padded with zeros to `padded`; null when none has the tensor.
  template <typename Place>
  const float* gather(const std::vector<Source>& group, const char* suffix, int padded, bool needed,
                      const Place& place) {
    bool any = needed;
    for (const Source& source : group) any = any || file_.has(source.name + suffix);
    if (!any) return nullptr;
    float* to = take<float>(padded);
    int at = 0;
    for (const Source& source : group) {
      if (needed || file_.has(source.name + suffix)) {
        const Tensor& tensor = file_.get(source.name + suffix, DType::kFloat32, {source.of});
        for (int i = 0; to != nullptr && i < source.n; ++i) to[place(at + i)] = tensor.float32()[source.first + i];
      }
      at += source.n;
    }
    return to;
  }

  Linear::Part pack_int8(const std::vector<Source>& group, int k, int padded_k, bool interleaved) {
    int n = 0;
    for (const Source& source : group) n += source.n;
    const int padded_n = round_up(n, layout_.block);
    Linear::Part part = {};
    uint8_t* data = take<uint8_t>(static_cast<size_t>(padded_n) * padded_k);
    const auto place = [=](int i) { return interleaved ? interleaved_place(i, n) : i; };
    part.int8 = {data, gather(group, ".scale", padded_n, true, place), gather(group, ".bias", padded_n, false, place),
                 n, padded_k};
    auto rows = std::make_shared<std::vector<const int8_t*>>(n);
    int at = 0;
    for (const Source& source : group) {
      const Tensor& tensor = file_.get(source.name + ".weight", DType::kInt8, {source.of, k});
      for (int i = 0; i < source.n; ++i)
        (*rows)[place(at + i)] = tensor.int8() + static_cast<size_t>(source.first + i) * k;
      at += source.n;
    }
    if (data == nullptr) return part;
    const WeightLayout layout = layout_;
    constexpr int kSpan = 512;  // rows of a job
    for (int first = 0; first < padded_n; first += kSpan) {
      const int last = first + kSpan < padded_n ? first + kSpan : padded_n;
      jobs.push_back([=] { pack_rows(*rows, first, last, k, padded_k, layout, data); });
    }
    return part;
  }

  static void pack_rows(const std::vector<const int8_t*>& rows, int first, int last, int k, int padded_k,
                        WeightLayout layout, uint8_t* data) {
    for (int n = first; n < last; ++n) {
      uint8_t* to = data + layout.index(n, 0, padded_k);
      const int8_t* from = n < static_cast<int>(rows.size()) ? rows[n] : nullptr;
      const size_t stride = static_cast<size_t>(layout.depth) * layout.block;
      for (int start = 0; start < padded_k; start += layout.depth, to += stride)
        for (int i = 0; i < layout.depth; ++i)
          to[i] = static_cast<uint8_t>((from != nullptr && start + i < k ? from[start + i] : 0) + layout.bias);
    }
  }

  Linear::Part pack_float(const std::vector<Source>& group, int k) {
    int n = 0;
    for (const Source& source : group) n += source.n;
    const int padded_n = round_up(n, 8);
    Linear::Part part = {};
    float* data = take<float>(static_cast<size_t>(padded_n) * k);
    part.floats = {data, gather(group, ".bias", padded_n, false, [](int i) { return i; }), n, k};
    int at = 0;
    for (const Source& source : group) {
      const Tensor& tensor = file_.get(source.name + ".weight", DType::kFloat32, {source.of, k});
      if (data != nullptr)
        for (int i = 0; i < source.n; ++i)
          for (int j = 0; j < k; ++j)
            data[(static_cast<size_t>((at + i) / 8) * k + j) * 8 + (at + i) % 8] =
                tensor.float32()[static_cast<size_t>(source.first + i) * k + j];
      at += source.n;
    }
    return part;
  }

  const Safetensors& file_;
  WeightLayout layout_;
  uint8_t* base_;
  size_t used_ = 0;
};

namespace {

// The one list of what a model is made of, walked by counting and by packing alike.
template <typename Packer>
void lay_out(const Manifest& manifest, Packer& packer, std::vector<LayerWeights>* layers, const float** norm,
             Linear* head, DraftWeights* draft) {
  const Architecture& m = manifest.model;
  const int dim = m.head_dim, q = m.heads * dim, kv = m.kv_heads * dim;
  for (int i = 0; i < m.layers; ++i) {
    const auto name = [i](const char* rest) { return layer_name(i, rest); };
    LayerWeights layer;
    layer.attention_norm = packer.floats(name("input_layernorm.weight"), m.hidden_size);
    layer.mlp_norm = packer.floats(name("post_attention_layernorm.weight"), m.hidden_size);
    std::vector<Source> qkv;
    for (int h = 0; h < m.kv_heads; ++h) {
      qkv.push_back({name("self_attn.k_proj"), dim, h * dim, kv});
      qkv.push_back({name("self_attn.v_proj"), dim, h * dim, kv});
      qkv.push_back({name("self_attn.q_proj"), q / m.kv_heads, q / m.kv_heads * h, q});
    }
    layer.qkv = packer.linear(qkv, m.hidden_size);
    layer.out = packer.linear({{name("self_attn.o_proj"), m.hidden_size}}, q);
    const std::string down = name("mlp.down_proj");
    layer.gate_up = packer.gate_up({name("mlp.gate_proj"), m.intermediate_size},
                                   {name("mlp.up_proj"), m.intermediate_size}, m.hidden_size, down);
    layer.down = packer.linear({{down, m.hidden_size}}, m.intermediate_size);
    layers->push_back(std::move(layer));
  }
  *norm = packer.floats("norm.weight", m.hidden_size);
  *head = packer.linear({{m.tied ? "embed_tokens" : "lm_head", m.vocab_size}}, m.hidden_size);

  const std::vector<int>& widths = manifest.draft.widths;
  if (widths.empty()) return;
  draft->embed_norm = packer.floats("draft.embed_norm.weight", m.hidden_size);
  for (size_t b = 0; b < widths.size(); ++b) {
    const std::string name = "draft.blocks." + std::to_string(b) + ".";
    DraftWeights::Block block;
    block.norm = packer.floats(name + "norm.weight", m.hidden_size);
    block.gate_up = packer.gate_up({name + "gate_proj", widths[b]}, {name + "up_proj", widths[b]},
                                   b == 0 ? 2 * m.hidden_size : m.hidden_size, name + "down_proj");
    block.down = packer.linear({{name + "down_proj", m.hidden_size}}, widths[b]);
    draft->blocks.push_back(std::move(block));
  }
  draft->norm = packer.floats("draft.norm.weight", m.hidden_size);
  draft->head = packer.linear({{"draft.head", manifest.draft.vocab_size}}, m.hidden_size);
}

// Throws Error(EDGEC_CORRUPT) unless they ascend and are in the vocabulary.
std::vector<int32_t> draft_tokens(const Manifest& manifest, const Safetensors& file) {
  const int32_t count = manifest.draft.vocab_size, vocab = manifest.model.vocab_size;
  const int32_t* tokens = file.get("draft.token_map", DType::kInt32, {count}).int32();
  for (int32_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab || (i > 0 && tokens[i] <= tokens[i - 1]))
      throw Error(EDGEC_CORRUPT, "draft.token_map is not ascending within the vocabulary at " + std::to_string(i));
  return {tokens, tokens + count};
}

size_t read_bytes(const Linear& linear) {
  size_t bytes = 0;
  for (const Linear::Part& part : linear.parts)
    bytes += part.is_float ? sizeof(float) * static_cast<size_t>(part.floats.n) * part.floats.k
                           : (static_cast<size_t>(part.int8.k) + sizeof(float)) * part.int8.n;
  return bytes;
}

}  // namespace

size_t Weights::packed_bytes(const Manifest& manifest, const Safetensors& file, const Kernels& kernels) {
  const Architecture& model = manifest.model;
  Packer packer(file, kernels, nullptr);
  std::vector<LayerWeights> layers;
  const float* norm;
  Linear head;
  DraftWeights draft;
  lay_out(manifest, packer, &layers, &norm, &head, &draft);
  if (!model.tied) {
    const size_t count = static_cast<size_t>(model.vocab_size) * model.hidden_size;
    if (is_int8(file, "embed_tokens")) {
      packer.take<int8_t>(count);
      packer.take<float>(model.vocab_size);
    } else {
      packer.take<float>(count);
    }
  }
  return packer.used();
}

Weights::Weights(const Manifest& manifest, Safetensors& file, const Kernels& kernels, ThreadPool& threads)
    : model_(manifest.model), layout_(kernels.layout), arena_(packed_bytes(manifest, file, kernels)) {
  const Architecture& model = manifest.model;
  Packer packer(file, kernels, arena_.data());
  lay_out(manifest, packer, &layers, &norm, &head, &draft);
  if (!draft.blocks.empty()) {
    draft.tokens = draft_tokens(manifest, file);
    draft_size_ = static_cast<size_t>(arena_.data() + packer.used() - draft_data());
  }
  if (!model.tied) {
    const size_t count = static_cast<size_t>(model.vocab_size) * model.hidden_size;
    const std::vector<int64_t> shape = {model.vocab_size, model.hidden_size};
    if (is_int8(file, "embed_tokens")) {
      int8_t* table = packer.take<int8_t>(count);
      std::memcpy(table, file.get("embed_tokens.weight", DType::kInt8, shape).data, count);
      table_ = table;
      table_scales_ = packer.floats("embed_tokens.scale", model.vocab_size);
    } else {
      float* table = packer.take<float>(count);
      std::memcpy(table, file.get("embed_tokens.weight", DType::kFloat32, shape).data, count * sizeof(float));
      table_floats_ = table;
    }
  }
  const Tensor& rope = file.get("rope.frequencies", DType::kFloat32, {model.head_dim / 2});
  frequencies.assign(rope.float32(), rope.float32() + model.head_dim / 2);
  constexpr int kBatch = 4096;  // a job list may be longer than a pool's
  for (size_t first = 0; first < packer.jobs.size(); first += kBatch) {
    const size_t rest = packer.jobs.size() - first;
    threads.run(static_cast<int>(rest < kBatch ? rest : kBatch), [&](int piece, int) { packer.jobs[first + piece](); });
  }
  for (const LayerWeights& layer : layers)
    read_per_token_ +=
        read_bytes(layer.qkv) + read_bytes(layer.out) + read_bytes(layer.gate_up) + read_bytes(layer.down);
  read_per_token_ += read_bytes(head);
  file.drop_pages();
}

size_t Weights::read_per_draft() const {
  if (draft.blocks.empty()) return 0;
  size_t bytes = read_bytes(draft.head);
  for (const DraftWeights::Block& block : draft.blocks) bytes += read_bytes(block.gate_up) + read_bytes(block.down);
  return bytes;
}

void Weights::embed(int token, float* out) const {
  const int hidden = model_.hidden_size;
  if (table_floats_ != nullptr) {
    std::memcpy(out, table_floats_ + static_cast<size_t>(token) * hidden, sizeof(float) * hidden);
  } else if (table_ != nullptr) {
    const int8_t* row = table_ + static_cast<size_t>(token) * hidden;
    for (int i = 0; i < hidden; ++i) out[i] = static_cast<float>(row[i]) * table_scales_[token];
  } else if (head.parts.front().is_float) {
    const float* data = head.parts.front().floats.data;
    for (int i = 0; i < hidden; ++i) out[i] = data[(static_cast<size_t>(token / 8) * hidden + i) * 8 + token % 8];
  } else {
    const PackedMatrix& table = head.parts.front().int8;
    for (int i = 0; i < hidden; ++i) {
      const int8_t value = static_cast<int8_t>(table.data[layout_.index(token, i, table.k)] - layout_.bias);
      out[i] = static_cast<float>(value) * table.scales[token];
    }
  }
}

}  // namespace edgec
