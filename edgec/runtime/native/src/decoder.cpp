#include "decoder.h"

#include <cmath>
#include <cstring>

#include "status.h"

namespace edgec {
namespace {

// Blocks that the end of a branch may reach into.
int tail_blocks(int block_size) { return (kMostBranch + block_size - 2) / block_size + 1; }

// Sizes of the buffers, walked by counting and by placing alike.
struct Layout {
  size_t used = 0;
  uint8_t* base = nullptr;

  template <typename T>
  T* take(size_t count) {
    const size_t at = used;
    used += aligned(count * sizeof(T));
    return base == nullptr ? nullptr : reinterpret_cast<T*>(base + at);
  }
};

struct Sizes {
  size_t hidden, q, qkv, gate_up, widest, logits, scratch, tail;

  Sizes(const Architecture& m, const KvLayout& kv, int context) {
    hidden = m.hidden_size;
    q = static_cast<size_t>(m.heads) * m.head_dim;
    qkv = q + 2 * static_cast<size_t>(m.kv_heads) * m.head_dim;
    gate_up = 2 * static_cast<size_t>(m.intermediate_size);
    widest = m.hidden_size;
    if (widest < static_cast<size_t>(m.intermediate_size)) widest = m.intermediate_size;
    if (widest < q) widest = q;
    logits = (static_cast<size_t>(m.vocab_size) + 15) / 16 * 16;
    scratch = (attention_scratch(kv, m.heads / m.kv_heads, context) + 15) / 16 * 16;
    tail = aligned(kv.head_bytes() * tail_blocks(kv.block_size));
  }
};

}  // namespace

struct Decoder::Buffers {
  float *x, *normed, *qkv, *attended, *gate_up, *delta, *final, *logits, *scratch;
  uint8_t* tails;

  Buffers(Layout& at, const Sizes& s, int threads, size_t rows, size_t wanted) {
    x = at.take<float>(rows * s.hidden);
    normed = at.take<float>(rows * s.hidden);
    qkv = at.take<float>(rows * s.qkv);
    attended = at.take<float>(rows * s.q);
    gate_up = at.take<float>(rows * s.gate_up);
    delta = at.take<float>(rows * s.hidden);
    final = at.take<float>(rows * s.hidden);
    logits = at.take<float>(wanted * s.logits);
    scratch = at.take<float>(threads * s.scratch);
    tails = at.take<uint8_t>(threads * kAttentionRows * s.tail + kReadPast);
  }
};

size_t Decoder::scratch_bytes(const Architecture& model, const KvLayout& kv, int threads, int context, int max_rows,
                              int max_wanted) {
  Layout counting;
  const Sizes sizes(model, kv, context);
  Buffers(counting, sizes, threads, max_rows, max_wanted);
  const size_t rows = max_rows > max_wanted ? max_rows : max_wanted;
  return counting.used + Products::bytes(rows, sizes.widest) +
         2 * sizeof(float) * static_cast<size_t>(context) * (model.head_dim / 2);
}

Decoder::Decoder(const Architecture& model, const Weights& weights, const Kernels& kernels, ThreadPool& threads,
                 KvStore& store, int context, int max_rows, int max_wanted)
    : model_(model),
      weights_(weights),
      kernels_(kernels),
      threads_(threads),
      store_(store),
      products_(kernels, threads, max_rows > max_wanted ? max_rows : max_wanted,
                Sizes(model, store.layout(), context).widest),
      rope_(weights.frequencies.data(), model.head_dim / 2, context, model.rope_factor),
      context_(context),
      max_rows_(max_rows),
      max_wanted_(max_wanted) {
  const Sizes sizes(model, store.layout(), context);
  Layout layout;
  Buffers(layout, sizes, threads.threads(), max_rows, max_wanted);
  arena_ = Pages(layout.used);
  layout = {0, arena_.data()};
  const Buffers buffers(layout, sizes, threads.threads(), max_rows, max_wanted);
  x_ = buffers.x;
  normed_ = buffers.normed;
  qkv_ = buffers.qkv;
  attended_ = buffers.attended;
  gate_up_ = buffers.gate_up;
  delta_ = buffers.delta;
  final_ = buffers.final;
  logits_ = buffers.logits;
  scratch_ = buffers.scratch;
  qkv_stride_ = sizes.qkv;
  logits_stride_ = sizes.logits;
  scratch_stride_ = sizes.scratch;
  tails_ = buffers.tails;
  tail_stride_ = sizes.tail;
}

void Decoder::discard_scratch() { arena_.discard(0, arena_.size()); }

void Decoder::rotate(int position, float* heads, int count) {
  const int dim = model_.head_dim, half = dim / 2;
  const size_t at = static_cast<size_t>(position) * half;
  for (int h = 0; h < count; ++h) kernels_.rotate(heads + h * dim, rope_.cos.data() + at, rope_.sin.data() + at, half);
}

// The new keys and values of one KV head.
void Decoder::store(const Batch& batch, int layer, int kv_head) {
  const KvLayout& kv = store_.layout();
  float* key = qkv_ + static_cast<size_t>(kv_head) * head_span();
  for (const Batch::Row& row : batch.rows) {
    rotate(row.position, key, 1);
    kernels_.store_kv(kv, store_.head(layer, kv_head, row.slot / kv.block_size), row.slot % kv.block_size, key,
                      key + model_.head_dim);
    key += qkv_stride_;
  }
}

void Decoder::attend(const Batch& batch, int layer, bool in_parts) {
  const KvLayout& kv = store_.layout();
  const int dim = model_.head_dim, group = model_.heads / model_.kv_heads;
  const size_t q = static_cast<size_t>(model_.heads) * dim;
  if (in_parts) products_.start_parts(weights_.layers[layer].out, static_cast<int>(batch.rows.size()));
  // Tiles of one KV head behind each other, so that a thread finds in its cache what the tile before it has read.
  const int tiles = static_cast<int>(tiles_.size());
  threads_.run(tiles * model_.kv_heads, [&](int piece, int thread) {
    const Tile& tile = tiles_[piece % tiles];
    const int kv_head = piece / tiles;
    float* queries = qkv_ + tile.first * qkv_stride_ + static_cast<size_t>(kv_head) * head_span() + 2 * dim;
    for (int r = 0; r < tile.rows; ++r) rotate(positions_[tile.first + r], queries + r * qkv_stride_, group);
    AttentionTask task;
    task.queries = queries;
    task.query_stride = qkv_stride_;
    task.out = attended_ + tile.first * q + static_cast<size_t>(kv_head) * group * dim;
    task.out_stride = q;
    task.rows = tile.rows;
    task.heads = group;
    task.positions = positions_.data() + tile.first;
    task.table = batch.tables[tile.sequence];
    task.pool = store_.head(layer, kv_head);
    task.scale = 1.0f / std::sqrt(static_cast<float>(dim));
    task.scratch = scratch_ + thread * scratch_stride_;
    const uint8_t* tails[kAttentionRows] = {};
    int blocks[kAttentionRows] = {};
    for (int r = 0; r < tile.rows; ++r) {
      const Batch::Row& row = batch.rows[tile.first + r];
      if (row.branch_length == 0) continue;
      uint8_t* tail = tails_ + (thread * kAttentionRows + r) * tail_stride_;
      gather_branch(batch, row, layer, kv_head, tail);
      tails[r] = tail;
      blocks[r] = (row.position - row.branch_length + 1) / kv.block_size;
      task.tails = tails;
      task.tail_blocks = blocks;
    }
    kernels_.attend(kv, task);
    if (!in_parts) return;
    for (int r = 0; r < tile.rows; ++r)
      products_.take_part(task.out + r * q, group * dim, tile.first + r, kv_head * group * dim);
  });
}

// The blocks at the end of a branch as they would lie if it were the sequence's only one: attention to them gives the
// same bits.
void Decoder::gather_branch(const Batch& batch, const Batch::Row& row, int layer, int kv_head, uint8_t* tail) {
  const KvLayout& kv = store_.layout();
  const int size = kv.block_size, first = row.position - row.branch_length + 1;
  const auto head_of = [&](int32_t block) { return store_.head(layer, kv_head, block); };
  if (first % size > 0) std::memcpy(tail, head_of(batch.tables[row.sequence][first / size]), kv.head_bytes());
  for (int i = 0; i < row.branch_length; ++i) {
    const int32_t slot = batch.branches[row.branch + i], place = first + i - first / size * size;
    kv.copy_position(head_of(slot / size), slot % size, tail + kv.head_bytes() * (place / size), place % size);
  }
}

// Tiles of attention as tall as leaves two pieces for each thread; those of one sequence as even as can be, since
// threads share them by number.
void Decoder::choose_tiles(const Batch& batch) {
  const int rows = static_cast<int>(batch.rows.size());
  int tallest = kAttentionRows;
  while (tallest > 1 && (rows + tallest - 1) / tallest * model_.kv_heads < 2 * threads_.threads()) tallest /= 2;
  tiles_.clear();
  for (int first = 0, end; first < rows; first = end) {
    const int sequence = batch.rows[first].sequence;
    for (end = first; end < rows && batch.rows[end].sequence == sequence;) ++end;
    for (int tiles = (end - first + tallest - 1) / tallest; tiles > 0; --tiles) {
      const int own = (end - first + tiles - 1) / tiles;
      tiles_.push_back({first, own, sequence});
      first += own;
    }
  }
}

void Decoder::forward(const Batch& batch) {
  const int rows = static_cast<int>(batch.rows.size()), hidden = model_.hidden_size;
  if (rows == 0) return;
  require(rows <= max_rows_, EDGEC_INTERNAL, "a batch is larger than its buffers");

  positions_.clear();
  for (int r = 0; r < rows; ++r) {
    const Batch::Row& row = batch.rows[r];
    positions_.push_back(row.position);
    weights_.embed(row.token, x_ + static_cast<size_t>(r) * hidden);
  }
  choose_tiles(batch);

  const size_t q = static_cast<size_t>(model_.heads) * model_.head_dim;
  // What only INT8 products want is quantised as soon as a row is there, so that one row's memory does for all of them.
  const auto stride_for = [&](const Linear& linear) {
    return linear.has_float || !Products::in_turn(rows) ? static_cast<size_t>(hidden) : 0;
  };
  const auto normalize = [&](int r, const float* weight, size_t stride) {
    kernels_.rms_norm(x_ + static_cast<size_t>(r) * hidden, weight, model_.norm_eps, hidden, normed_ + r * stride);
  };
  const auto add_delta = [&](int first, int end) {
    for (int r = 0; r < rows; ++r) {
      const size_t at = static_cast<size_t>(r) * hidden + first;
      kernels_.add(x_ + at, delta_ + at, end - first);
    }
  };
  const Follow adding = Follow::by(kGroup, kGroup, add_delta);
  const int span = head_span();
  for (int i = 0; i < model_.layers; ++i) {
    const LayerWeights& layer = weights_.layers[i];
    const size_t for_qkv = stride_for(layer.qkv), for_mlp = stride_for(layer.gate_up);
    const auto store_heads = [&](int first, int end) {
      for (int head = (first + span - 1) / span; head * span < end; ++head) store(batch, i, head);
    };
    const Follow storing = Follow::by(span, 2 * model_.head_dim, store_heads);
    products_.multiply(
        layer.qkv, normed_, for_qkv, rows, qkv_, qkv_stride_,
        [&](int r) { normalize(r, layer.attention_norm, for_qkv); }, &storing);
    // One row is quantised in a moment, and its scales lie in one line of the cache.
    const bool in_parts = rows > 1 && !layer.out.has_float && q / model_.kv_heads % kGroup == 0;
    attend(batch, i, in_parts);
    if (in_parts)
      products_.multiply_parts(layer.out, rows, delta_, hidden, &adding);
    else
      products_.multiply(
          layer.out, attended_, q, rows, delta_, hidden, [](int) {}, &adding);
    products_.multiply_gated(
        layer.gate_up, layer.down, normed_, for_mlp, rows, gate_up_, delta_, hidden,
        [&](int r) { normalize(r, layer.mlp_norm, for_mlp); }, &adding);
  }

  int at = 0;
  for (int r = 0; r < rows; ++r)
    if (batch.rows[r].wanted)
      kernels_.rms_norm(x_ + static_cast<size_t>(r) * hidden, weights_.norm, model_.norm_eps, hidden,
                        final_ + static_cast<size_t>(at++) * hidden);
}

void Decoder::project(int first, int count) {
  require(count <= max_wanted_ && first + count <= max_rows_, EDGEC_INTERNAL, "more logits than there is room for");
  const int hidden = model_.hidden_size;
  if (count > 0)
    products_.multiply(weights_.head, final_ + static_cast<size_t>(first) * hidden, hidden, count, logits_,
                       logits_stride_, [](int) {});
}

}  // namespace edgec
