// A model's weights, packed once for the kernels at hand. Reads the file through; keeps nothing of it mapped in.
#ifndef EDGEC_WEIGHTS_H
#define EDGEC_WEIGHTS_H

#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "manifest.h"
#include "memory.h"
#include "safetensors.h"
#include "thread_pool.h"

namespace edgec {

// A product y = W x of one or more layers that read the same x. Layers that the recipe left in float are parts of
// their own.
struct Linear {
  struct Part {
    int offset;  // of its first output in y
    bool is_float;
    PackedMatrix int8;
    FloatMatrix floats;
  };
  std::vector<Part> parts;
  int n = 0;       // outputs
  int k = 0;       // inputs
  int padded = 0;  // k, padded to groups
  // Of which kinds there are parts.
  bool has_int8 = false, has_float = false;
  // Of gate and up: outputs lie in groups (kGroup) of gates, each before the group of their ups.
  bool interleaved = false;
};

struct LayerWeights {
  const float* attention_norm;  // (hidden)
  const float* mlp_norm;
  Linear qkv;      // for each KV head its key, its value, and the queries that share it, (head_dim) outputs each
  Linear out;      // attention's output
  Linear gate_up;  // 2 · intermediate
  Linear down;
};

// See draft_head.h.
struct DraftWeights {
  struct Block {
    const float* norm;  // (hidden)
    Linear gate_up;     // 2 · width outputs of 2 · hidden inputs (the first block) or hidden inputs
    Linear down;
  };
  const float* embed_norm = nullptr;  // (hidden)
  std::vector<Block> blocks;
  const float* norm = nullptr;  // (hidden), before the output layer
  Linear head;
  std::vector<int32_t> tokens;  // of each of its outputs, ascending
};

class Weights {
 public:
  // Bytes of memory that the packed weights will take, from the file's header alone.
  static size_t packed_bytes(const Manifest& manifest, const Safetensors& file, const Kernels& kernels);

  // Throws Error(EDGEC_CORRUPT) when a tensor is missing or has another shape.
  Weights(const Manifest& manifest, Safetensors& file, const Kernels& kernels, ThreadPool& threads);

  // Row `token` of the embedding, (hidden) floats.
  void embed(int token, float* out) const;

  std::vector<LayerWeights> layers;
  const float* norm;  // before the output layer
  Linear head;
  DraftWeights draft;              // without blocks when the bundle has no draft head
  std::vector<float> frequencies;  // of rotary positions, (head_dim / 2)
  size_t bytes() const { return arena_.size(); }
  // The draft head's weights, which lie together; null and 0 without one.
  const uint8_t* draft_data() const { return reinterpret_cast<const uint8_t*>(draft.embed_norm); }
  size_t draft_size() const { return draft_size_; }
  size_t read_per_draft() const;  // bytes that one proposal of the draft head reads; 0 without one
  size_t read_per_token() const { return read_per_token_; }  // bytes that one decoded token reads at least

 private:
  class Packer;

  Architecture model_;
  WeightLayout layout_;
  Pages arena_;
  size_t read_per_token_ = 0;
  size_t draft_size_ = 0;
  // The embedding: the packed output layer when tied, else a table of its own.
  const int8_t* table_ = nullptr;
  const float* table_scales_ = nullptr;
  const float* table_floats_ = nullptr;
};

}  // namespace edgec

#endif  // EDGEC_WEIGHTS_H
