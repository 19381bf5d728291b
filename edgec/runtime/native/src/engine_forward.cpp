// A pass over rows that the caller placed himself: for parity checks and tools.
#include <algorithm>
#include <cstring>

#include "engine.h"
#include "status.h"

namespace edgec {

void Engine::forward(const int32_t* tokens, const int32_t* positions, const int32_t* slots, const int32_t* sequence,
                     int32_t rows, const int32_t* tables, int32_t sequences, int32_t width, float* logits,
                     float* hidden) {
  const Stepping stepping(stepping_);
  require(tokens != nullptr && positions != nullptr && slots != nullptr && sequence != nullptr && tables != nullptr,
          EDGEC_INVALID_ARGUMENT, "a null array");
  require(rows >= 0 && sequences > 0 && width > 0, EDGEC_INVALID_ARGUMENT, "sizes must be positive");
  const int bs = config_.block_size;
  for (int64_t i = 0; i < static_cast<int64_t>(sequences) * width; ++i)
    require(tables[i] >= 0 && tables[i] < store_->blocks(), EDGEC_INVALID_ARGUMENT,
            "a block that the pool doesn't have");
  for (int32_t i = 0; i < rows; ++i) {
    require(tokens[i] >= 0 && tokens[i] < manifest_.model.vocab_size, EDGEC_INVALID_ARGUMENT,
            "a token outside the vocabulary");
    require(sequence[i] >= 0 && sequence[i] < sequences, EDGEC_INVALID_ARGUMENT, "a row of no sequence");
    require(positions[i] >= 0 && positions[i] < config_.context && positions[i] / bs < width, EDGEC_INVALID_ARGUMENT,
            "a position beyond the context or the table");
    require(slots[i] >= 0 && slots[i] / bs < store_->blocks(), EDGEC_INVALID_ARGUMENT, "a slot beyond the pool");
  }
  const size_t vocab = manifest_.model.vocab_size, size = manifest_.model.hidden_size;
  Batch batch;
  for (int32_t s = 0; s < sequences; ++s) batch.tables.push_back(tables + static_cast<size_t>(s) * width);
  for (int32_t start = 0; start < rows; start += decoder_->max_rows()) {
    const int32_t count = std::min(rows - start, decoder_->max_rows());
    batch.rows.clear();
    for (int32_t i = start; i < start + count; ++i)
      batch.rows.push_back({tokens[i], positions[i], slots[i], sequence[i], logits != nullptr || hidden != nullptr});
    decoder_->forward(batch);
    if (hidden != nullptr) std::memcpy(hidden + start * size, decoder_->hidden(0), sizeof(float) * count * size);
    for (int32_t first = 0; logits != nullptr && first < count; first += decoder_->max_wanted()) {
      const int32_t part = std::min(count - first, decoder_->max_wanted());
      decoder_->project(first, part);
      for (int32_t i = 0; i < part; ++i)
        std::memcpy(logits + (start + first + i) * vocab, decoder_->logits(i), sizeof(float) * vocab);
    }
  }
}

}  // namespace edgec
