#include "tiny_bundle.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "edgec.h"
#include "kernels/kernels.h"

namespace edgec {
namespace {

constexpr int kVocab = 259, kHidden = 72, kLayers = 2, kHeads = 6, kKvHeads = 2, kDim = 12;
constexpr int kDraftVocab = 130;

// A linear congruence: the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float unit() { return static_cast<float>(next() % 20001) / 10000.0f - 1.0f; }

 private:
  uint64_t state_;
};

class SafetensorsWriter {
 public:
  void int8(const std::string& name, int rows, int columns, Random& random) {
    std::vector<int8_t> weights(static_cast<size_t>(rows) * columns);
    for (int8_t& w : weights) w = static_cast<int8_t>(static_cast<int>(random.next() % 255) - 127);
    std::vector<float> scales(rows);
    for (float& s : scales) s = (0.6f + 0.4f * random.unit()) / 700.0f;
    add(name + ".weight", "I8", "[" + std::to_string(rows) + "," + std::to_string(columns) + "]", weights.data(),
        weights.size());
    vector(name + ".scale", scales);
  }

  void floats(const std::string& name, int rows, int columns, Random& random) {
    std::vector<float> weights(static_cast<size_t>(rows) * columns);
    for (float& w : weights) w = 0.1f * random.unit();
    add(name + ".weight", "F32", "[" + std::to_string(rows) + "," + std::to_string(columns) + "]", weights.data(),
        weights.size() * 4);
  }

  void vector(const std::string& name, const std::vector<float>& values) {
    add(name, "F32", "[" + std::to_string(values.size()) + "]", values.data(), values.size() * 4);
  }

  void integers(const std::string& name, const std::vector<int32_t>& values) {
    add(name, "I32", "[" + std::to_string(values.size()) + "]", values.data(), values.size() * 4);
  }

  std::string finish() {
    header_ += "}";
    while ((header_.size() + 8) % 8 != 0) header_ += ' ';
    std::string out(8, '\0');
    const uint64_t length = header_.size();
    std::memcpy(&out[0], &length, 8);
    return out + header_ + data_;
  }

 private:
  void add(const std::string& name, const char* type, const std::string& shape, const void* data, size_t bytes) {
    while (data_.size() % 4 != 0) data_ += '\0';
    const size_t begin = data_.size();
    data_.append(static_cast<const char*>(data), bytes);
    header_ += (header_.size() > 1 ? "," : "") + ("\"" + name + "\":{\"dtype\":\"" + type + "\",\"shape\":" + shape) +
               ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(data_.size()) + "]}";
  }

  std::string header_ = "{", data_;
};

std::vector<float> norm(int count, Random& random) {
  std::vector<float> values(count);
  for (float& v : values) v = 1.0f + 0.2f * random.unit();
  return values;
}

std::string model(const TinyOptions& options) {
  Random random(7);
  SafetensorsWriter file;
  file.int8("embed_tokens", kVocab, kHidden, random);
  for (int i = 0; i < kLayers; ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    file.vector(layer + "input_layernorm.weight", norm(kHidden, random));
    file.vector(layer + "post_attention_layernorm.weight", norm(kHidden, random));
    file.int8(layer + "self_attn.q_proj", kHeads * kDim, kHidden, random);
    file.int8(layer + "self_attn.k_proj", kKvHeads * kDim, kHidden, random);
    file.int8(layer + "self_attn.v_proj", kKvHeads * kDim, kHidden, random);
    if (options.bias) file.vector(layer + "self_attn.k_proj.bias", norm(kKvHeads * kDim, random));
    file.int8(layer + "self_attn.o_proj", kHidden, kHeads * kDim, random);
    file.int8(layer + "mlp.gate_proj", options.wide, kHidden, random);
    file.int8(layer + "mlp.up_proj", options.wide, kHidden, random);
    if (options.float_layer && i == 0)
      file.floats(layer + "mlp.down_proj", kHidden, options.wide, random);
    else
      file.int8(layer + "mlp.down_proj", kHidden, options.wide, random);
  }
  file.vector("norm.weight", norm(kHidden, random));
  if (!options.tied) file.int8("lm_head", kVocab, kHidden, random);
  std::vector<float> frequencies;
  float frequency = 1.0f;
  for (int i = 0; i < kDim / 2; ++i, frequency *= 0.25f) frequencies.push_back(frequency);
  file.vector("rope.frequencies", frequencies);
  if (options.draft) {
    file.vector("draft.embed_norm.weight", norm(kHidden, random));
    for (int b = 0; b < 2; ++b) {
      const std::string block = "draft.blocks." + std::to_string(b) + ".";
      file.vector(block + "norm.weight", norm(kHidden, random));
      file.int8(block + "gate_proj", options.wide, b == 0 ? 2 * kHidden : kHidden, random);
      file.int8(block + "up_proj", options.wide, b == 0 ? 2 * kHidden : kHidden, random);
      file.int8(block + "down_proj", kHidden, options.wide, random);
    }
    file.vector("draft.norm.weight", norm(kHidden, random));
    file.int8("draft.head", kDraftVocab, kHidden, random);
    std::vector<int32_t> tokens;
    for (int i = 0; i < kDraftVocab; ++i) tokens.push_back(2 * i < kVocab ? 2 * i : kVocab - 1);
    tokens.back() = kVocab - 1;
    file.integers("draft.token_map", tokens);
  }
  return file.finish();
}

// The 256 bytes as byte-level BPE writes them, "th" as the one merge, and two special tokens.
std::string tokenizer() {
  std::string vocab;
  std::vector<int> code(256);
  int extra = 256;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    code[b] = printable ? b : extra++;
  }
  for (int b = 0; b < 256; ++b) {
    char text[16];
    std::snprintf(text, sizeof(text), "\"\\u%04x\":%d,", code[b], b);
    vocab += text;
  }
  vocab += "\"th\":256";
  const std::string flags =
      "\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}";
  return "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":["
         "{\"id\":257,\"content\":\"<|end|>\"," +
         flags + ",{\"id\":258,\"content\":\"<|start|>\"," + flags +
         "],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":"
         "true,\"use_regex\":true},\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":"
         "true,\"trim_offsets\":true,\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":"
         "null,"
         "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,"
         "\"vocab\":{" +
         vocab + "},\"merges\":[\"t h\"]}}";
}

}  // namespace

void write_text(const std::string& path, const std::string& content) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || std::fwrite(content.data(), 1, content.size(), file) != content.size()) std::abort();
  std::fclose(file);
}

std::string read_text(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) std::abort();
  std::string content;
  char part[4096];
  size_t count;
  while ((count = std::fread(part, 1, sizeof(part), file)) > 0) content.append(part, count);
  std::fclose(file);
  return content;
}

std::string make_tiny_bundle(const TinyOptions& options) {
  const char* root = std::getenv("TMPDIR");
  std::string folder = std::string(root != nullptr ? root : "/tmp") + "/edgec-test-XXXXXX";
  if (mkdtemp(&folder[0]) == nullptr) std::abort();
  const std::string weights = model(options);
  write_text(folder + "/model.safetensors", weights);
  write_text(folder + "/tokenizer.json", tokenizer());
  const auto number = [](int value) { return std::to_string(value); };
  write_text(
      folder + "/manifest.json",
      "{\"format\":1,\"abi\":" + number(options.abi != 0 ? options.abi : EDGEC_ABI_VERSION) +
          ",\"activation_group\":" + number(kGroup) +
          ",\"eos\":[257],\"architecture\":{\"vocab_size\":" + number(kVocab) + ",\"hidden_size\":" + number(kHidden) +
          ",\"intermediate_size\":" + number(options.wide) + ",\"layers\":" + number(kLayers) +
          ",\"heads\":" + number(kHeads) + ",\"kv_heads\":" + number(kKvHeads) + ",\"head_dim\":" + number(kDim) +
          ",\"norm_eps\":1e-5,\"rope_factor\":1.0," + "\"max_positions\":" + number(options.context * 2) +
          ",\"tied\":" + (options.tied ? "true" : "false") + "},\"defaults\":{\"context\":" + number(options.context) +
          ",\"block_size\":8,\"max_batch\":16,\"step_tokens\":32,\"kv\":\"int8\",\"memory_budget\":64000000}," +
          (options.draft ? "\"draft\":{\"design\":\"recurrent\",\"widths\":[" + number(options.wide) + "," +
                               number(options.wide) + "],\"vocab\":" + number(kDraftVocab) + "},"
                         : std::string()) +
          "\"files\":{\"model.safetensors\":{\"bytes\":" + std::to_string(weights.size()) + "}}}");
  return folder;
}

void remove_bundle(const std::string& folder) {
  for (const char* name : {"/model.safetensors", "/tokenizer.json", "/manifest.json"})
    std::remove((folder + name).c_str());
  rmdir(folder.c_str());
}

}  // namespace edgec
