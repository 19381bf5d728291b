// String to int32, built once and then only read: open addressing over views of strings that outlive it.
#ifndef EDGEC_STRING_TABLE_H_
#define EDGEC_STRING_TABLE_H_

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace edgec {

class StringTable {
 public:
  StringTable() = default;

  // Room for `count` strings without growing (it never grows).
  explicit StringTable(size_t count) {
    size_t slots = 16;
    while (slots < count * 2) slots *= 2;
    slots_.assign(slots, Slot{});
    keys_.reserve(count);
  }

  // False, and unchanged, when the key is there already.
  bool insert(std::string_view key, int32_t value) {
    const uint64_t hash = hash_of(key);
    Slot* slot = probe(key, hash);
    if (slot->index >= 0) return false;
    *slot = {static_cast<uint32_t>(hash >> 32), static_cast<int32_t>(keys_.size())};
    keys_.push_back({key, value});
    return true;
  }

  // −1 when it isn't there.
  int32_t find(std::string_view key) const {
    if (slots_.empty()) return -1;
    const Slot* slot = const_cast<StringTable*>(this)->probe(key, hash_of(key));
    return slot->index < 0 ? -1 : keys_[static_cast<size_t>(slot->index)].value;
  }

 private:
  struct Slot {
    uint32_t tag = 0;  // the hash's upper half: spares most comparisons
    int32_t index = -1;
  };
  struct Key {
    std::string_view key;
    int32_t value;
  };

  static uint64_t hash_of(std::string_view key) {
    uint64_t hash = 0x9E3779B97F4A7C15u ^ key.size();
    const char* p = key.data();
    size_t left = key.size();
    while (left >= 8) {
      uint64_t eight;
      std::memcpy(&eight, p, 8);
      hash = mix(hash ^ eight);
      p += 8;
      left -= 8;
    }
    uint64_t rest = 0;
    for (size_t i = 0; i < left; ++i) rest |= static_cast<uint64_t>(static_cast<uint8_t>(p[i])) << (8 * i);
    return mix(hash ^ rest);
  }

  static uint64_t mix(uint64_t x) {
    x *= 0xD6E8FEB86659FD93u;
    return x ^ x >> 32;
  }

  Slot* probe(std::string_view key, uint64_t hash) {
    const size_t mask = slots_.size() - 1;
    const auto tag = static_cast<uint32_t>(hash >> 32);
    for (size_t i = hash & mask;; i = (i + 1) & mask) {
      Slot& slot = slots_[i];
      if (slot.index < 0) return &slot;
      if (slot.tag == tag && keys_[static_cast<size_t>(slot.index)].key == key) return &slot;
    }
  }

  std::vector<Slot> slots_;
  std::vector<Key> keys_;
};

}  // namespace edgec

#endif  // EDGEC_STRING_TABLE_H_
