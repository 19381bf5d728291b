// The memory behind a BlockPool: keys and values of every layer, block by block.
#ifndef EDGEC_KV_STORE_H
#define EDGEC_KV_STORE_H

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "memory.h"

namespace edgec {

class KvStore {
 public:
  // Zeroed, but not yet resident: the system gives pages when a block is first written.
  KvStore(KvLayout layout, int layers, int blocks)
      : layout_(layout), layers_(layers), blocks_(blocks), pages_(layout.block_bytes() * layers * blocks + kReadPast) {}

  static size_t bytes_per_block(const KvLayout& layout, int layers) { return layout.block_bytes() * layers; }

  const KvLayout& layout() const { return layout_; }
  int blocks() const { return blocks_; }
  // Block 0 of a head; the others follow.
  uint8_t* head(int layer, int kv_head) {
    return pages_.data() + layout_.head_bytes() * blocks_ * (static_cast<size_t>(layer) * layout_.kv_heads + kv_head);
  }
  uint8_t* head(int layer, int kv_head, int32_t block) { return head(layer, kv_head) + layout_.head_bytes() * block; }

  void copy(int32_t from, int32_t to);
  // One position's keys and values in every layer; slots are block · block_size + offset.
  void copy_slot(int32_t from, int32_t to);
  // Give the pages of blocks [first, end), which hold nothing, back to the system.
  void discard(int32_t first, int32_t end);

 private:
  KvLayout layout_;
  int layers_;
  int blocks_;
  Pages pages_;
};

}  // namespace edgec

#endif  // EDGEC_KV_STORE_H
