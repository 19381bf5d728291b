#include "draft_head.h"

#include <algorithm>

namespace edgec {
namespace {

size_t widest(const Manifest& manifest) {
  size_t most = 2 * static_cast<size_t>(manifest.model.hidden_size);
  for (const int width : manifest.draft.widths) most = std::max(most, static_cast<size_t>(width));
  return most;
}

size_t gate_up_size(const Manifest& manifest) {
  return 2 * static_cast<size_t>(*std::max_element(manifest.draft.widths.begin(), manifest.draft.widths.end()));
}

size_t padded_vocab(const Manifest& manifest) {
  return (static_cast<size_t>(manifest.draft.vocab_size) + 15) / 16 * 16;
}

}  // namespace

size_t DraftHead::scratch_bytes(const Manifest& manifest, int max_rows) {
  if (manifest.draft.widths.empty()) return 0;
  const size_t floats =
      3 * static_cast<size_t>(manifest.model.hidden_size) + gate_up_size(manifest) + padded_vocab(manifest);
  return Products::bytes(max_rows, widest(manifest)) + max_rows * floats * sizeof(float);
}

DraftHead::DraftHead(const Manifest& manifest, const Weights& weights, const Kernels& kernels, ThreadPool& threads,
                     int max_rows)
    : model_(manifest.model),
      max_rows_(max_rows),
      weights_(weights),
      kernels_(kernels),
      products_(kernels, threads, max_rows, widest(manifest)),
      stride_(padded_vocab(manifest)) {
  const size_t rows = max_rows, hidden = model_.hidden_size;
  inputs_.resize(rows * 2 * hidden);
  gate_up_.resize(rows * gate_up_size(manifest));
  delta_.resize(rows * hidden);
  logits_.resize(rows * stride_);
}

void DraftHead::step(const int32_t* tokens, int rows, float* states) {
  const size_t hidden = model_.hidden_size;
  const DraftWeights& draft = weights_.draft;
  const auto norm = [&](const float* x, const float* weight, float* out) {
    kernels_.rms_norm(x, weight, model_.norm_eps, model_.hidden_size, out);
  };
  for (size_t b = 0; b < draft.blocks.size(); ++b) {
    const DraftWeights::Block& block = draft.blocks[b];
    const size_t stride = b == 0 ? 2 * hidden : hidden;
    const auto make = [&](int r) {
      float* in = inputs_.data() + r * stride;
      norm(states + r * hidden, block.norm, in);
      if (b > 0) return;
      weights_.embed(tokens[r], in + hidden);
      norm(in + hidden, draft.embed_norm, in + hidden);
    };
    products_.multiply_gated(block.gate_up, block.down, inputs_.data(), stride, rows, gate_up_.data(), delta_.data(),
                             hidden, make);
    for (int r = 0; r < rows; ++r) kernels_.add(states + r * hidden, delta_.data() + r * hidden, model_.hidden_size);
  }
  products_.multiply(draft.head, inputs_.data(), hidden, rows, logits_.data(), stride_,
                     [&](int r) { norm(states + r * hidden, draft.norm, inputs_.data() + r * hidden); });
}

}  // namespace edgec
