// Paged memory for keys and values: which block belongs to whom, and which prefix is in it. Holds no tensors.
//
// A block is free, cached (no owner, still findable by what is in it), or owned by one or more sequences.
// `free + cached + owned == total`, always; `verify` checks that and everything below.
#ifndef EDGEC_BLOCK_POOL_H
#define EDGEC_BLOCK_POOL_H

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace edgec {

using BlockId = int32_t;
constexpr BlockId kNoBlock = -1;

struct PoolCounts {
  int32_t total, free, cached, owned;
  int64_t owned_tokens;  // positions filled in owned blocks, a shared block counted once
};

// Hashes `count` tokens on top of `previous`. Injectable, because a test needs one that always collides.
using HashFunction = uint64_t (*)(uint64_t previous, const int32_t* tokens, int32_t count);

// What besides the tokens must be equal for two sequences to share keys and values. Each part is written with a tag and
// its length, so no choice of values makes two different keys the same bytes (vllm#44701).
class PrefixKey {
 public:
  explicit PrefixKey(std::string bytes = {}) : bytes_(std::move(bytes)) {}
  PrefixKey& add(const char* tag, uint64_t value);
  PrefixKey& add(const char* tag, const std::string& value);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class BlockPool {
 public:
  // Blocks are numbered `first_block … first_block + blocks − 1`: an owner may keep the numbers below for itself.
  // Throws EDGEC_INVALID_ARGUMENT unless blocks ≥ 1 and 1 ≤ block_size ≤ 1024.
  BlockPool(int32_t blocks, int32_t block_size, BlockId first_block = 0, HashFunction hash = nullptr);

  // A block with one owner and nothing in it: the one freed last, else the least recently used cached one, whose prefix
  // is forgotten. None when every block is owned.
  std::optional<BlockId> allocate();
  void retain(BlockId block);   // one owner more; takes a cached block back into use
  void release(BlockId block);  // one owner less; without owners to cached when published, else to free

  // Copy-on-write. With one owner: `block` itself (and its prefix is forgotten, for it is about to be written). With
  // more: a block of the caller's own in exchange for his share of `block`; he copies the contents. None: no block
  // left.
  std::optional<BlockId> make_writable(BlockId block);

  // Says how many positions of an owned block hold keys and values.
  void set_filled(BlockId block, int32_t positions);

  // ---- Prefixes. A block's identity is its parent's serial number and its tokens; serials are never used twice, so
  // by induction equal identity means equal key and equal tokens from the first position on. Hashes only find
  // candidates.

  uint64_t root_hash(const std::string& key) const;
  uint64_t extend(uint64_t previous, const int32_t* tokens) const;  // over one full block

  // Makes the full, owned `block` findable as the child of `parent` (a serial; 0 for a first block) and returns the
  // block to use from now on with its serial in `serial`. When an equal block is published already that one is
  // returned, and the caller's share of `block` has been exchanged for a share of it. Equal blocks hold equal bits,
  // because a position's keys and values depend on nothing but the tokens up to it.
  BlockId publish(BlockId block, uint64_t parent, uint64_t hash, const int32_t* tokens, const std::string& key,
                  uint64_t* serial);

  // The longest published prefix of the first `blocks` full blocks of `tokens`, appended to `found`. `hashes[i]` is the
  // chain's hash after block i. Changes nothing: `retain` what you take.
  void find_prefix(const std::string& key, const uint64_t* hashes, const int32_t* tokens, int32_t blocks,
                   std::vector<BlockId>* found) const;
  uint64_t serial(BlockId block) const { return at(block).serial; }  // 0: not published

  // Forgets every cached prefix: cached blocks become free. Owned ones stay, and stay findable.
  void trim();

  PoolCounts counts() const { return {total_, free_, cached_, total_ - free_ - cached_, owned_tokens_}; }
  int32_t available() const { return free_ + cached_; }  // how often `allocate` would succeed
  int32_t owners(BlockId block) const { return at(block).owners; }
  bool is_free(BlockId block) const { return at(block).state == State::kFree; }
  int32_t block_size() const { return block_size_; }
  int32_t total() const { return total_; }
  BlockId first_block() const { return first_; }

  // "" when the whole structure is sound, else what is wrong. O(total): for tests and debug builds.
  std::string verify() const;

 private:
  enum class State : uint8_t { kFree, kCached, kOwned };
  struct Block {
    uint64_t serial = 0;  // 0: not published
    uint64_t parent = 0;
    uint64_t hash = 0;
    int32_t owners = 0;
    int32_t filled = 0;
    int32_t older = kNoBlock, newer = kNoBlock;  // in the order of use, while cached
    int32_t chain = kNoBlock;                    // the next in its bucket, while published
    State state = State::kFree;
  };

  Block& at(BlockId block);
  const Block& at(BlockId block) const;
  int32_t find(uint64_t parent, uint64_t hash, const int32_t* tokens, const std::string& key) const;
  void forget(int32_t index);  // take it out of its bucket
  void unlink(int32_t index);  // take it out of the order of use
  int32_t* tokens_of(int32_t index) { return tokens_.data() + static_cast<size_t>(index) * block_size_; }
  const int32_t* tokens_of(int32_t index) const { return tokens_.data() + static_cast<size_t>(index) * block_size_; }

  int32_t total_, block_size_;
  BlockId first_;
  HashFunction hash_;
  int32_t free_ = 0, cached_ = 0;
  int64_t owned_tokens_ = 0;
  uint64_t next_serial_ = 1;
  int32_t oldest_ = kNoBlock, newest_ = kNoBlock;  // cached blocks by use
  std::vector<Block> blocks_;                      // by block − first_block
  std::vector<int32_t> free_list_;                 // the last is taken first: its memory is warm
  std::vector<int32_t> buckets_;                   // heads of chains; a power of two of them
  std::vector<int32_t> tokens_;                    // (total, block_size), of published blocks
  std::unordered_map<int32_t, std::string> keys_;  // of published first blocks
};

}  // namespace edgec

#endif  // EDGEC_BLOCK_POOL_H
