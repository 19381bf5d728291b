// manifest.json of a bundle's `native` folder: what the model is, and the sizes that the recipe chose.
#ifndef EDGEC_MANIFEST_H
#define EDGEC_MANIFEST_H

#include <cstdint>
#include <string>
#include <vector>

namespace edgec {

// The Llama family (RMSNorm, rotary positions, grouped-query attention, SwiGLU).
struct Architecture {
  int vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim;
  int max_positions;
  float norm_eps;
  float rope_factor;  // on cos and sin (YaRN's attention factor); frequencies are a tensor of the model
  bool tied;          // the output layer is the embedding
};

// A head that proposes tokens from the model's last hidden state; without widths there is none.
struct DraftArchitecture {
  std::vector<int> widths;  // of its blocks
  int vocab_size = 0;       // tokens that it can propose
};

struct Manifest {
  Architecture model;
  DraftArchitecture draft;
  std::string name;
  std::vector<int32_t> eos;  // tokens that end an answer
  int context, block_size, max_batch, step_tokens;
  uint64_t memory_budget;
  std::string kv;  // "int8", "fp16" or "fp32"
  uint64_t model_bytes;

  // Throws Error: EDGEC_VERSION_MISMATCH (another ABI or format), EDGEC_CORRUPT, EDGEC_UNSUPPORTED, and those of
  // read_file. The file `model.safetensors` beside it must have the size that the manifest gives.
  static Manifest load(const std::string& folder);
};

}  // namespace edgec

#endif  // EDGEC_MANIFEST_H
