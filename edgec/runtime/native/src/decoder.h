// One pass of a Llama over rows of any sequences, with keys and values in a paged store.
//
// A row's result depends on its token, its position and the keys and values before it, and on nothing else: not on the
// other rows, not on the threads, not on the kernel set. That is what "one answer" rests on.
#ifndef EDGEC_DECODER_H
#define EDGEC_DECODER_H

#include <cstdint>
#include <vector>

#include "kv_store.h"
#include "products.h"
#include "rope_tables.h"
#include "thread_pool.h"
#include "weights.h"

namespace edgec {

constexpr int kMostBranch = 8;  // positions of a branch

// Rows of one pass. Rows of a sequence stand together, in the order of their positions; those of a tree of proposals so
// that every row comes after the one before it in its branch.
struct Batch {
  struct Row {
    int32_t token;
    int32_t position;
    int32_t slot;      // block · block_size + offset: where its key and value go
    int32_t sequence;  // index into `tables`
    bool wanted;       // its logits are
    // Of a row in a branch: its last `branch_length` positions, its own included, don't lie where the table says, but
    // in the slots that begin at `branches[branch]`.
    int32_t branch = 0, branch_length = 0;
  };
  std::vector<Row> rows;
  std::vector<int32_t> branches;       // slots
  std::vector<const int32_t*> tables;  // block tables: position p of a sequence lies in block tables[s][p / block_size]
};

class Decoder {
 public:
  // Everything that a pass needs is allocated here: for `max_rows` rows, and logits of `max_wanted`.
  Decoder(const Architecture& model, const Weights& weights, const Kernels& kernels, ThreadPool& threads,
          KvStore& store, int context, int max_rows, int max_wanted);

  static size_t scratch_bytes(const Architecture& model, const KvLayout& kv, int threads, int context, int max_rows,
                              int max_wanted);

  // Runs the batch up to the final norm. Afterwards `hidden(i)` is the i-th wanted row's last hidden state, (hidden).
  void forward(const Batch& batch);

  // The output layer for wanted rows [first, first + count), count ≤ max_wanted: `logits(i)` is row first + i's,
  // (vocab).
  void project(int first, int count);

  float* logits(int row) { return logits_ + static_cast<size_t>(row) * logits_stride_; }
  const float* hidden(int wanted) const { return final_ + static_cast<size_t>(wanted) * model_.hidden_size; }
  int max_rows() const { return max_rows_; }
  int max_wanted() const { return max_wanted_; }
  void discard_scratch();  // give its pages back until the next pass

 private:
  struct Tile {  // rows that attend together
    int first, rows, sequence;
  };
  struct Buffers;

  void choose_tiles(const Batch& batch);
  void store(const Batch& batch, int layer, int kv_head);
  void attend(const Batch& batch, int layer, bool in_parts);
  void gather_branch(const Batch& batch, const Batch::Row& row, int layer, int kv_head, uint8_t* tail);
  void rotate(int position, float* heads, int count);  // RoPE, in place
  // Of one KV head in a row of qkv: its key, its value, and the queries that share it.
  int head_span() const { return (2 + model_.heads / model_.kv_heads) * model_.head_dim; }

  const Architecture model_;
  const Weights& weights_;
  const Kernels& kernels_;
  ThreadPool& threads_;
  KvStore& store_;
  Products products_;
  RopeTables rope_;
  int context_, max_rows_, max_wanted_;
  size_t qkv_stride_, logits_stride_;

  Pages arena_;
  float *x_, *normed_, *qkv_, *attended_, *gate_up_, *delta_, *final_, *logits_, *scratch_;
  size_t scratch_stride_;  // floats of a thread's
  uint8_t* tails_;         // of branches, gathered: (tail_stride_) bytes for each thread and row of a tile
  size_t tail_stride_;
  std::vector<Tile> tiles_;
  std::vector<int32_t> positions_;
};

}  // namespace edgec

#endif  // EDGEC_DECODER_H
