#include "kv_store.h"

#include <cstring>

namespace edgec {

void KvStore::copy(int32_t from, int32_t to) {
  for (int i = 0; i < layers_; ++i) std::memcpy(block(i, to), block(i, from), layout_.block_bytes());
}

void KvStore::discard(int32_t block) {
  const size_t bytes = layout_.block_bytes();
  for (int i = 0; i < layers_; ++i)
    pages_.discard(bytes * (static_cast<size_t>(blocks_) * i + static_cast<size_t>(block)), bytes);
}

}  // namespace edgec
