#include "kv_store.h"

#include <cstring>

namespace edgec {

void KvLayout::copy_position(const uint8_t* from, int from_offset, uint8_t* to, int to_offset) const {
  // Keys lie transposed: as elements, or of INT8 as fours.
  const size_t bytes = element(), step = type == KvType::kInt8 ? 4 : bytes;
  for (size_t at = 0; at < bytes * padded_dim(); at += step)
    std::memcpy(to + at * block_size + step * to_offset, from + at * block_size + step * from_offset, step);
  to += plane();
  from += plane();
  if (type != KvType::kInt8) {
    const size_t row = bytes * head_dim;
    std::memcpy(to + row * to_offset, from + row * from_offset, row);
    return;
  }
  const auto first = [&](int offset) { return static_cast<size_t>(offset / 4) * head_dim * 4 + offset % 4; };
  for (int d = 0; d < head_dim; ++d) to[first(to_offset) + 4 * d] = from[first(from_offset) + 4 * d];
  to += plane();
  from += plane();
  for (int i = 0; i < 2; ++i)
    std::memcpy(to + scales() * i + sizeof(float) * to_offset, from + scales() * i + sizeof(float) * from_offset,
                sizeof(float));
}

void KvStore::copy_slot(int32_t from, int32_t to) {
  const int size = layout_.block_size;
  for (int i = 0; i < layers_; ++i) {
    const uint8_t* source = block(i, from / size);
    uint8_t* target = block(i, to / size);
    for (int h = 0; h < layout_.kv_heads; ++h)
      layout_.copy_position(source + layout_.head_bytes() * h, from % size, target + layout_.head_bytes() * h,
                            to % size);
  }
}

void KvStore::copy(int32_t from, int32_t to) {
  for (int i = 0; i < layers_; ++i) std::memcpy(block(i, to), block(i, from), layout_.block_bytes());
}

void KvStore::discard(int32_t block) {
  const size_t bytes = layout_.block_bytes();
  for (int i = 0; i < layers_; ++i)
    pages_.discard(bytes * (static_cast<size_t>(blocks_) * i + static_cast<size_t>(block)), bytes);
}

}  // namespace edgec
