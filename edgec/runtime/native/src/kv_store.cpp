#include "kv_store.h"

#include <cstring>

namespace edgec {
namespace {

// One column of a plane whose rows are `width` elements of `Size` bytes; a known size keeps each copy an instruction.
template <size_t Size>
void copy_column(const uint8_t* from, uint8_t* to, int rows, size_t width) {
  for (int i = 0; i < rows; ++i, from += Size * width, to += Size * width) std::memcpy(to, from, Size);
}

}  // namespace

void KvLayout::copy_position(const uint8_t* from, int from_offset, uint8_t* to, int to_offset) const {
  const size_t width = static_cast<size_t>(block_size);
  const uint8_t* values = from + plane();
  uint8_t* to_values = to + plane();
  if (type == KvType::kInt8) {
    copy_column<4>(from + 4 * from_offset, to + 4 * to_offset, padded_dim() / 4, width);
    copy_column<1>(values + value_column(from_offset), to_values + value_column(to_offset), head_dim, 4);
    const uint8_t* scale = values + plane() + sizeof(float) * from_offset;
    copy_column<4>(scale, to_values + plane() + sizeof(float) * to_offset, 2, width);
    return;
  }
  if (type == KvType::kFp16)
    copy_column<2>(from + 2 * from_offset, to + 2 * to_offset, head_dim, width);
  else
    copy_column<4>(from + 4 * from_offset, to + 4 * to_offset, head_dim, width);
  const size_t row = element() * head_dim;
  std::memcpy(to_values + row * to_offset, values + row * from_offset, row);
}

void KvStore::copy_slot(int32_t from, int32_t to) {
  const int size = layout_.block_size;
  for (int i = 0; i < layers_; ++i)
    for (int h = 0; h < layout_.kv_heads; ++h)
      layout_.copy_position(head(i, h, from / size), from % size, head(i, h, to / size), to % size);
}

void KvStore::copy(int32_t from, int32_t to) {
  for (int i = 0; i < layers_; ++i)
    for (int h = 0; h < layout_.kv_heads; ++h) std::memcpy(head(i, h, to), head(i, h, from), layout_.head_bytes());
}

void KvStore::discard(int32_t first, int32_t end) {
  const size_t bytes = layout_.head_bytes() * static_cast<size_t>(end - first);
  for (int i = 0; i < layers_; ++i)
    for (int h = 0; h < layout_.kv_heads; ++h)
      pages_.discard(static_cast<size_t>(head(i, h, first) - pages_.data()), bytes);
}

}  // namespace edgec
