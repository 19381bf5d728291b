#include "kv_store.h"

#include <cstring>

namespace edgec {

void KvLayout::copy_position(const uint8_t* from, int from_offset, uint8_t* to, int to_offset) const {
  const size_t bytes = element(), row = bytes * head_dim;
  for (int d = 0; d < head_dim; ++d)  // keys lie transposed
    std::memcpy(to + (static_cast<size_t>(d) * block_size + to_offset) * bytes,
                from + (static_cast<size_t>(d) * block_size + from_offset) * bytes, bytes);
  std::memcpy(to + plane() + row * to_offset, from + plane() + row * from_offset, row);
  if (type != KvType::kInt8) return;
  for (int i = 0; i < 2; ++i)
    std::memcpy(to + 2 * plane() + scales() * i + sizeof(float) * to_offset,
                from + 2 * plane() + scales() * i + sizeof(float) * from_offset, sizeof(float));
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
