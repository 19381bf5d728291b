// The arithmetic of a decoder, once per instruction set. Every set gives the same bits (see ../vector_math.h).
//
//     y[r, n] = scale_w[n] · Σ_g scale_x[r, g] · (Σ_{k in group g} x[r, k] · w[n, k])  (+ bias[n])
//
// with x and w INT8: the inner sum is exact in int32, the outer one is float and runs over the groups in order. Weights
// have one scale per output channel, as the quantise pass fixed it. Activations are quantised as they come, symmetric,
// one scale per row and group of 32: one outlier costs its group precision, not the whole row.
#ifndef EDGEC_KERNELS_H
#define EDGEC_KERNELS_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgec {

constexpr int kGroup = 32;  // activations that share a scale; every k is padded to a multiple of it

// Where weight (n, k) lies: blocks of `block` channels; in a block, `depth` consecutive k of each channel side by side.
// `bias` is added to the stored byte: kernels that multiply unsigned by signed want w + 128.
struct WeightLayout {
  int block;
  int depth;
  int bias;

  size_t index(int n, int k, int padded_k) const {
    const size_t row = static_cast<size_t>(n / block) * padded_k * block;
    return row + static_cast<size_t>(k / depth) * depth * block + static_cast<size_t>(n % block) * depth + k % depth;
  }
};

// INT8 activations. Of `depth` consecutive k (the weights' depth) all rows lie side by side, so that a product walks
// through one stream however many rows it takes:
//   values (k / depth, rows, depth), scales and offsets (k / kGroup, rows)
// An offset is −bias · Σ of the group's values, bias being the weights': where the sum of a product starts.
struct QuantizedRows {
  int8_t* values;
  float* scales;
  int32_t* offsets;
  int rows;
  int k;  // padded

  const int8_t* at(int row, int k_index, int depth) const {
    return values + static_cast<size_t>(k_index / depth) * rows * depth + row * depth + k_index % depth;
  }
};

// Packed INT8 weights. `data` holds ceil(n / block) · block channels.
struct PackedMatrix {
  const uint8_t* data;
  const float* scales;  // (padded n)
  const float* bias;    // (padded n) or null
  int n;
  int k;  // padded
};

// Float weights of layers that the recipe kept in float, packed as [n / 8][k][8].
struct FloatMatrix {
  const float* data;
  const float* bias;
  int n;
  int k;
};

enum class KvType : int32_t { kInt8 = 0, kFp16 = 1, kFp32 = 2 };

// How keys and values lie in a pool. Each KV head of a layer has its blocks behind each other: what attention to one
// head reads is one stream as long as blocks follow each other, which processors fetch ahead. A block of a head holds
//   keys (head_dim, block_size), values (block_size, head_dim); or for INT8
//   keys (head_dim / 4, block_size, 4), values (block_size / 4, head_dim, 4), then their scales (block_size) each,
//   float.
// So a vector of scores takes many positions at once, without sums across lanes, and products of INT8 go by fours.
struct KvLayout {
  KvType type;
  int block_size;
  int kv_heads;
  int head_dim;

  size_t element() const { return type == KvType::kInt8 ? 1 : type == KvType::kFp16 ? 2 : 4; }
  int padded_dim() const { return type == KvType::kInt8 ? (head_dim + 3) / 4 * 4 : head_dim; }
  size_t plane() const { return static_cast<size_t>(block_size) * padded_dim() * element(); }  // of keys, or of values
  size_t scales() const { return type == KvType::kInt8 ? sizeof(float) * block_size : 0; }
  size_t head_bytes() const { return 2 * (plane() + scales()); }
  size_t block_bytes() const { return head_bytes() * kv_heads; }  // of a block in all heads

  // Of one head's INT8 keys, and of its values: (block_size).
  const float* key_scales(const uint8_t* head) const { return reinterpret_cast<const float*>(head + 2 * plane()); }
  const float* value_scales(const uint8_t* head) const { return key_scales(head) + block_size; }
  // Where a position's INT8 values begin in their plane; each is four bytes behind the one before it.
  size_t value_column(int offset) const { return static_cast<size_t>(offset / 4) * head_dim * 4 + offset % 4; }

  // One position's key and value of one KV head, from one block's head to another's.
  void copy_position(const uint8_t* from, int from_offset, uint8_t* to, int to_offset) const;
};

// A few query rows of one sequence, for the query heads that share one KV head.
struct AttentionTask {
  const float* queries;  // row r, head h: queries + r · query_stride + h · head_dim; rotated, not yet scaled
  size_t query_stride;
  float* out;  // the same shape
  size_t out_stride;
  int rows;
  int heads;
  const int32_t* positions;  // (rows), each attends to positions 0 … its own
  const int32_t* table;      // blocks of the sequence
  const uint8_t* pool;       // of this layer and KV head
  float scale;               // on the scores
  float* scratch;            // attention_scratch(...) floats
  // Rows whose last positions don't lie where the table says: for each, null or blocks of this head, (head_bytes) each,
  // instead of the table's from block `tail_blocks` on. May be null.
  const uint8_t* const* tails = nullptr;
  const int* tail_blocks = nullptr;
};

constexpr int kAttentionRows = 4;                       // that an AttentionTask may have
constexpr int kAttentionQueries = kAttentionRows * 16;  // and heads of all its rows
constexpr size_t kReadPast = 64;                        // bytes behind a pool, or a tail, that must be readable
constexpr int kMostInt8Positions = 131072;              // sums of 127 · 127 fit an int32

// Floats that a task needs: for each query scores, digits of weights and of itself, and sums; for all scales, where
// blocks lie, and a block.
inline size_t attention_scratch(const KvLayout& kv, int heads, int context) {
  const size_t places = static_cast<size_t>(context) + 64, dim = static_cast<size_t>(kv.head_dim) + 16;
  return kAttentionRows * heads * (places * 3 / 2 + 3 * dim + 128) + places * 3 / 2 + 64 * dim;
}

struct Kernels {
  const char* name;
  WeightLayout layout;

  // Channel blocks [begin, end) of y (rows, stride). For x.rows from 1 up.
  void (*matmul)(const QuantizedRows& x, const PackedMatrix& w, int begin, int end, float* y, size_t stride);
  // The same for float weights, blocks of 8: x (rows, x_stride).
  void (*matmul_float)(const float* x, size_t x_stride, int rows, const FloatMatrix& w, int begin, int end, float* y,
                       size_t stride);
  // x (count) becomes the groups from number `group` on of row `row` of `to`; the last one is zero-padded.
  void (*quantize)(const float* x, int count, const QuantizedRows& to, int row, int group);
  // RMSNorm: out = x / rms(x) · weight.
  void (*rms_norm)(const float* x, const float* weight, float eps, int count, float* out);
  void (*add)(float* x, const float* y, int count);  // x += y
  // out = gate / (1 + e^−gate) · up; may overwrite gate.
  void (*silu_mul)(const float* gate, const float* up, int count, float* out);
  // Rotate one head in place: cos and sin (head_dim / 2), channels paired as (i, i + head_dim / 2).
  void (*rotate)(float* head, const float* cos, const float* sin, int half);
  // Write one position's key and value, (head_dim) each, into a block of their head.
  void (*store_kv)(const KvLayout& kv, uint8_t* head, int offset, const float* key, const float* value);
  void (*attend)(const KvLayout& kv, const AttentionTask& task);
};

// What was compiled in and this CPU can run, best first; plain C++ ("scalar") is always the last.
std::vector<const Kernels*> usable_kernels();

// By name, or the best when `name` is null or empty. Throws Error (unsupported, naming what there is).
const Kernels& pick_kernels(const char* name);

}  // namespace edgec

#endif  // EDGEC_KERNELS_H
