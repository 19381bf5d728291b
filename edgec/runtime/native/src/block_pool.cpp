#include "block_pool.h"

#include <algorithm>
#include <cstring>

#include "status.h"

namespace edgec {
namespace {

// Every bit of the token and of the hash so far reaches every bit of the result (splitmix64's finaliser).
uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t hash_tokens(uint64_t previous, const int32_t* tokens, int32_t count) {
  uint64_t h = mix(previous + 0x9e3779b97f4a7c15u);
  for (int32_t i = 0; i < count; ++i) {
    // One multiplication a token; the finaliser at the end spreads what is left.
    h = (h ^ static_cast<uint32_t>(tokens[i])) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
  }
  return mix(h);
}

void append_number(std::string* bytes, uint64_t value) {
  for (int i = 0; i < 8; ++i) bytes->push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

void append_counted(std::string* bytes, const char* data, size_t size) {
  append_number(bytes, size);
  bytes->append(data, size);
}

}  // namespace

PrefixKey& PrefixKey::add(const char* tag, uint64_t value) {
  std::string bytes;
  append_number(&bytes, value);
  return add(tag, bytes);
}

PrefixKey& PrefixKey::add(const char* tag, const std::string& value) {
  append_counted(&bytes_, tag, std::strlen(tag));
  append_counted(&bytes_, value.data(), value.size());
  return *this;
}

BlockPool::BlockPool(int32_t blocks, int32_t block_size, BlockId first_block, HashFunction hash)
    : total_(blocks), block_size_(block_size), first_(first_block), hash_(hash ? hash : hash_tokens) {
  require(blocks >= 1, EDGEC_INVALID_ARGUMENT, "the block pool needs at least one block");
  require(block_size >= 1 && block_size <= 1024, EDGEC_INVALID_ARGUMENT, "block_size is 1 to 1024 tokens");
  require(first_block >= 0 && first_block <= INT32_MAX - blocks, EDGEC_INVALID_ARGUMENT, "first_block out of range");
  size_t buckets = 1;
  while (buckets < static_cast<size_t>(blocks)) buckets *= 2;
  blocks_.resize(blocks);
  buckets_.assign(buckets, kNoBlock);
  tokens_.resize(static_cast<size_t>(blocks) * block_size);
  free_list_.reserve(blocks);
  for (int32_t i = blocks - 1; i >= 0; --i) free_list_.push_back(i);
  free_ = blocks;
}

BlockPool::Block& BlockPool::at(BlockId block) {
  require(block >= first_ && block - first_ < total_, EDGEC_INTERNAL, "no such block");
  return blocks_[block - first_];
}

const BlockPool::Block& BlockPool::at(BlockId block) const { return const_cast<BlockPool*>(this)->at(block); }

std::optional<BlockId> BlockPool::allocate() {
  int32_t index;
  if (!free_list_.empty()) {
    index = free_list_.back();
    free_list_.pop_back();
    --free_;
  } else if (oldest_ != kNoBlock) {
    index = oldest_;
    unlink(index);
    forget(index);
    --cached_;
  } else {
    return std::nullopt;
  }
  Block& block = blocks_[index];
  block.state = State::kOwned;
  block.owners = 1;
  block.filled = 0;
  return index + first_;
}

void BlockPool::retain(BlockId id) {
  Block& block = at(id);
  require(block.state != State::kFree, EDGEC_INTERNAL, "retained a free block");
  if (block.state == State::kCached) {
    unlink(id - first_);
    --cached_;
    block.state = State::kOwned;
    owned_tokens_ += block.filled;
  }
  ++block.owners;
}

void BlockPool::release(BlockId id) {
  Block& block = at(id);
  require(block.state == State::kOwned, EDGEC_INTERNAL, "released a block that nobody owns");
  if (--block.owners > 0) return;
  owned_tokens_ -= block.filled;
  const int32_t index = id - first_;
  if (block.serial == 0) {
    block.state = State::kFree;
    block.filled = 0;
    free_list_.push_back(index);
    ++free_;
    return;
  }
  block.state = State::kCached;
  block.older = newest_;
  block.newer = kNoBlock;
  (newest_ == kNoBlock ? oldest_ : blocks_[newest_].newer) = index;
  newest_ = index;
  ++cached_;
}

std::optional<BlockId> BlockPool::make_writable(BlockId id) {
  Block& block = at(id);
  require(block.state == State::kOwned, EDGEC_INTERNAL, "made writable a block that nobody owns");
  if (block.owners == 1) {
    if (block.serial != 0) forget(id - first_);
    return id;
  }
  const std::optional<BlockId> copy = allocate();
  if (copy) {
    --block.owners;
    set_filled(*copy, block.filled);
  }
  return copy;
}

void BlockPool::set_filled(BlockId id, int32_t positions) {
  Block& block = at(id);
  require(block.state == State::kOwned && positions >= 0 && positions <= block_size_, EDGEC_INTERNAL,
          "filled a block that nobody owns, or beyond its end");
  owned_tokens_ += positions - block.filled;
  block.filled = positions;
}

uint64_t BlockPool::root_hash(const std::string& key) const {
  uint64_t h = mix(key.size());
  for (const char c : key) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return mix(h);
}

uint64_t BlockPool::extend(uint64_t previous, const int32_t* tokens) const {
  return hash_(previous, tokens, block_size_);
}

int32_t BlockPool::find(uint64_t parent, uint64_t hash, const int32_t* tokens, const std::string& key) const {
  const size_t bytes = static_cast<size_t>(block_size_) * sizeof(int32_t);
  for (int32_t i = buckets_[hash & (buckets_.size() - 1)]; i != kNoBlock; i = blocks_[i].chain) {
    const Block& block = blocks_[i];
    if (block.hash != hash || block.parent != parent) continue;
    if (std::memcmp(tokens_of(i), tokens, bytes) != 0) continue;
    if (parent == 0 && keys_.at(i) != key) continue;
    return i;
  }
  return kNoBlock;
}

BlockId BlockPool::publish(BlockId id, uint64_t parent, uint64_t hash, const int32_t* tokens, const std::string& key,
                           uint64_t* serial) {
  Block& block = at(id);
  require(block.state == State::kOwned, EDGEC_INTERNAL, "published a block that nobody owns");
  const int32_t equal = find(parent, hash, tokens, key);
  if (equal != kNoBlock) {
    if (equal != id - first_) {
      retain(equal + first_);
      release(id);
    }
    *serial = blocks_[equal].serial;
    return equal + first_;
  }
  const int32_t index = id - first_;
  require(block.serial == 0, EDGEC_INTERNAL, "published a block under two identities");
  if (parent == 0) keys_[index] = key;
  set_filled(id, block_size_);
  block.serial = next_serial_++;
  block.parent = parent;
  block.hash = hash;
  std::copy_n(tokens, block_size_, tokens_of(index));
  int32_t& bucket = buckets_[hash & (buckets_.size() - 1)];
  block.chain = bucket;
  bucket = index;
  *serial = block.serial;
  return id;
}

void BlockPool::find_prefix(const std::string& key, const uint64_t* hashes, const int32_t* tokens, int32_t blocks,
                            std::vector<BlockId>* found) const {
  uint64_t parent = 0;
  for (int32_t b = 0; b < blocks; ++b) {
    const int32_t i = find(parent, hashes[b], tokens + static_cast<size_t>(b) * block_size_, key);
    if (i == kNoBlock) return;
    found->push_back(i + first_);
    parent = blocks_[i].serial;
  }
}

void BlockPool::trim() {
  while (oldest_ != kNoBlock) {
    const int32_t index = oldest_;
    unlink(index);
    forget(index);
    --cached_;
    blocks_[index].state = State::kFree;
    blocks_[index].filled = 0;
    free_list_.push_back(index);
    ++free_;
  }
}

void BlockPool::forget(int32_t index) {
  Block& block = blocks_[index];
  int32_t* link = &buckets_[block.hash & (buckets_.size() - 1)];
  while (*link != index) link = &blocks_[*link].chain;
  *link = block.chain;
  if (block.parent == 0) keys_.erase(index);
  block.serial = block.parent = block.hash = 0;
  block.chain = kNoBlock;
}

void BlockPool::unlink(int32_t index) {
  Block& block = blocks_[index];
  (block.older == kNoBlock ? oldest_ : blocks_[block.older].newer) = block.newer;
  (block.newer == kNoBlock ? newest_ : blocks_[block.newer].older) = block.older;
  block.older = block.newer = kNoBlock;
}

std::string BlockPool::verify() const {
  std::vector<uint8_t> seen(total_, 0);
  for (const int32_t i : free_list_) {
    if (i < 0 || i >= total_ || seen[i]++) return "the free list names a block twice, or none";
    if (blocks_[i].state != State::kFree) return "a block in the free list is not free";
  }
  int32_t cached = 0;
  int32_t before = kNoBlock;
  for (int32_t i = oldest_; i != kNoBlock; before = i, i = blocks_[i].newer) {
    if (i < 0 || i >= total_ || seen[i]++) return "the order of use names a block twice, or one that is free";
    if (blocks_[i].state != State::kCached || blocks_[i].older != before) return "the order of use is broken";
    ++cached;
  }
  if (before != newest_) return "the order of use doesn't end at the newest block";
  int32_t owned = 0;
  int64_t filled = 0;
  size_t published = 0, roots = 0;
  for (int32_t i = 0; i < total_; ++i) {
    const Block& block = blocks_[i];
    if ((block.state == State::kOwned) != (block.owners > 0)) return "a block's owners don't fit its state";
    if ((block.state == State::kOwned) == (seen[i] != 0)) return "an owned block is in a list, or another in none";
    if (block.state == State::kCached && block.serial == 0) return "a cached block can't be found";
    if (block.state == State::kFree && (block.serial != 0 || block.filled != 0)) return "a free block holds something";
    if (block.serial >= next_serial_) return "a serial number was never given";
    if (block.serial != 0 && block.filled != block_size_) return "a published block is not full";
    published += block.serial != 0;
    roots += block.serial != 0 && block.parent == 0;
    owned += block.state == State::kOwned;
    if (block.state == State::kOwned) filled += block.filled;
  }
  if (free_ != static_cast<int32_t>(free_list_.size()) || cached_ != cached) return "the counts don't fit the lists";
  if (free_ + cached_ + owned != total_) return "free + cached + owned is not total";
  if (filled != owned_tokens_) return "owned_tokens is wrong";
  if (roots != keys_.size()) return "keys and first blocks don't fit";
  size_t chained = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (int32_t i = buckets_[b]; i != kNoBlock; i = blocks_[i].chain) {
      if (++chained > published) return "a bucket's chain has a cycle, or an unpublished block";
      if (blocks_[i].serial == 0 || (blocks_[i].hash & (buckets_.size() - 1)) != b)
        return "a block is in a wrong bucket";
      if (blocks_[i].parent == 0 && keys_.count(i) == 0) return "a first block has no key";
    }
  }
  return chained == published ? "" : "a published block is in no bucket";
}

}  // namespace edgec
