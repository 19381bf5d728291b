#include <vector>

#include "block_pool.h"
#include "check.h"
#include "status.h"

using namespace edgec;

namespace {

uint64_t collide(uint64_t, const int32_t*, int32_t) { return 42; }

BlockId take(BlockPool* pool) { return pool->allocate().value_or(kNoBlock); }
BlockId own(BlockPool* pool, BlockId block) { return pool->make_writable(block).value_or(kNoBlock); }

// Publishes `tokens` as a chain in fresh blocks and gives the table.
std::vector<BlockId> fill(BlockPool* pool, const std::vector<int32_t>& tokens, const std::string& key) {
  std::vector<BlockId> table;
  uint64_t serial = 0, hash = pool->root_hash(key);
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(pool->block_size())) {
    hash = pool->extend(hash, tokens.data() + at);
    table.push_back(pool->publish(take(pool), serial, hash, tokens.data() + at, key, &serial));
  }
  return table;
}

std::vector<BlockId> find(const BlockPool& pool, const std::vector<int32_t>& tokens, const std::string& key) {
  std::vector<uint64_t> hashes;
  uint64_t hash = pool.root_hash(key);
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(pool.block_size())) {
    hashes.push_back(hash = pool.extend(hash, tokens.data() + at));
  }
  std::vector<BlockId> found;
  pool.find_prefix(key, hashes.data(), tokens.data(), static_cast<int32_t>(hashes.size()), &found);
  return found;
}

void release(BlockPool* pool, const std::vector<BlockId>& table) {
  for (size_t i = table.size(); i-- > 0;) pool->release(table[i]);
}

}  // namespace

TEST(pool_gives_the_lowest_block_first_and_the_last_freed_next) {
  BlockPool pool(4, 2, 10);
  CHECK_EQ(take(&pool), 10);
  CHECK_EQ(take(&pool), 11);
  CHECK_EQ(take(&pool), 12);
  pool.release(10);
  pool.release(12);
  CHECK_EQ(take(&pool), 12);
  CHECK_EQ(take(&pool), 10);
  CHECK_EQ(take(&pool), 13);
  CHECK(!pool.allocate());
  CHECK_EQ(pool.verify(), "");
}

TEST(pool_evicts_the_least_recently_used_prefix_tail_first) {
  BlockPool pool(4, 2);
  const std::vector<BlockId> a = fill(&pool, {1, 2, 3, 4}, ""), b = fill(&pool, {5, 6, 7, 8}, "");
  release(&pool, a);
  release(&pool, b);
  CHECK_EQ(pool.counts().cached, 4);
  for (const BlockId block : find(pool, {1, 2, 3, 4}, "")) pool.retain(block);  // used: now b is the older one
  release(&pool, a);
  CHECK_EQ(take(&pool), b[1]);
  CHECK_EQ(find(pool, {5, 6, 7, 8}, "").size(), size_t{1});
  CHECK_EQ(take(&pool), b[0]);
  CHECK_EQ(take(&pool), a[1]);
  CHECK_EQ(take(&pool), a[0]);
  CHECK(!pool.allocate());
  CHECK_EQ(pool.verify(), "");
}

TEST(pool_with_a_hash_that_always_collides_finds_only_equal_prefixes) {
  BlockPool pool(16, 2, 0, collide);
  const std::vector<BlockId> a = fill(&pool, {1, 2, 3, 4}, "");
  fill(&pool, {9, 9, 3, 4}, "");
  CHECK(find(pool, {1, 2, 3, 4}, "") == a);
  CHECK_EQ(find(pool, {9, 9, 3, 5}, "").size(), size_t{1});
  CHECK_EQ(find(pool, {3, 4}, "").size(), size_t{0});  // equal tokens, another parent
  CHECK_EQ(find(pool, {1, 2, 3, 4}, "salt").size(), size_t{0});
  CHECK_EQ(pool.verify(), "");
}

TEST(pool_never_takes_a_child_of_a_parent_that_was_forgotten) {
  BlockPool pool(3, 1, 0, collide);
  const std::vector<BlockId> a = fill(&pool, {1, 2}, "");
  pool.release(a[0]);  // parent first: it will be evicted first
  pool.release(a[1]);
  pool.allocate();  // the free one
  const BlockId again = take(&pool);
  CHECK_EQ(again, a[0]);
  uint64_t serial;
  const int32_t seven = 7;
  pool.publish(again, 0, 42, &seven, "", &serial);  // another prefix in the same block
  CHECK_EQ(find(pool, {7, 2}, "").size(), size_t{1});
  CHECK_EQ(pool.verify(), "");
}

TEST(pool_exchanges_equal_blocks_when_they_are_published) {
  BlockPool pool(8, 2);
  const std::vector<BlockId> a = fill(&pool, {1, 2, 3, 4}, ""), b = fill(&pool, {1, 2, 3, 4}, "");
  CHECK(a == b);
  CHECK_EQ(pool.owners(a[0]), 2);
  CHECK_EQ(pool.counts().owned, 2);
  CHECK_EQ(pool.counts().free, 6);
}

TEST(pool_copies_on_write_only_what_is_shared) {
  BlockPool pool(3, 4);
  const BlockId block = take(&pool);
  pool.set_filled(block, 3);
  CHECK_EQ(own(&pool, block), block);
  pool.retain(block);
  const BlockId copy = own(&pool, block);
  CHECK(copy != block);
  CHECK_EQ(pool.owners(block), 1);
  CHECK_EQ(pool.counts().owned_tokens, int64_t{6});
  pool.retain(block);
  pool.allocate();
  CHECK(!pool.make_writable(block));
  CHECK_EQ(pool.owners(block), 2);
  CHECK_EQ(pool.verify(), "");
}

TEST(pool_forgets_a_prefix_that_is_about_to_be_overwritten) {
  BlockPool pool(2, 2);
  const std::vector<BlockId> a = fill(&pool, {1, 2}, "");
  CHECK_EQ(own(&pool, a[0]), a[0]);
  CHECK_EQ(find(pool, {1, 2}, "").size(), size_t{0});
  CHECK_EQ(pool.verify(), "");
}

TEST(pool_trim_forgets_cached_prefixes_and_keeps_owned_ones) {
  BlockPool pool(4, 2);
  const std::vector<BlockId> a = fill(&pool, {1, 2}, "");
  release(&pool, fill(&pool, {3, 4}, ""));
  pool.trim();
  CHECK_EQ(pool.counts().cached, 0);
  CHECK_EQ(pool.counts().free, 3);
  CHECK_EQ(find(pool, {1, 2}, "").size(), size_t{1});
  CHECK_EQ(find(pool, {3, 4}, "").size(), size_t{0});
}

TEST(pool_refuses_misuse) {
  BlockPool pool(2, 2, 1);
  CHECK_THROWS(pool.release(1), EDGEC_INTERNAL);
  CHECK_THROWS(pool.retain(1), EDGEC_INTERNAL);
  CHECK_THROWS(pool.owners(0), EDGEC_INTERNAL);
  CHECK_THROWS(pool.owners(3), EDGEC_INTERNAL);
  CHECK_THROWS(BlockPool(0, 16), EDGEC_INVALID_ARGUMENT);
  CHECK_THROWS(BlockPool(1, 0), EDGEC_INVALID_ARGUMENT);
}

TEST(keys_cannot_be_made_equal_by_choosing_their_parts) {
  CHECK(PrefixKey().add("a", std::string("bc")).bytes() != PrefixKey().add("ab", std::string("c")).bytes());
  CHECK(PrefixKey().add("s", std::string("xy")).add("t", std::string("")).bytes() !=
        PrefixKey().add("s", std::string("x")).add("t", std::string("y")).bytes());
  CHECK(PrefixKey().add("salt", uint64_t{1}).bytes() != PrefixKey().add("adapter", uint64_t{1}).bytes());
}
