#include "bpe.h"

#include <algorithm>

namespace edgec {
namespace {

constexpr uint32_t kNever = ~uint32_t{0};

uint64_t key_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

size_t slot_of(uint64_t key, size_t mask) {
  const uint64_t hash = key * 0x9E3779B97F4A7C15u;
  return static_cast<size_t>(hash >> 32 ^ hash) & mask;
}

// For a heap with the lowest rank on top; of equal ranks the leftmost.
struct Later {
  bool operator()(const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  }
};

}  // namespace

Bpe::Bpe(const std::vector<Word>& vocabulary, const std::vector<Merge>& merges,
         const std::array<int32_t, 256>& byte_tokens, Options options)
    : options_(options), byte_tokens_(byte_tokens), words_(vocabulary.size()) {
  int32_t greatest = -1;
  for (const Word& word : vocabulary) {
    words_.insert(word.bytes, word.id);
    greatest = std::max(greatest, word.id);
  }
  reachable_.reset(new std::atomic<uint8_t>[static_cast<size_t>(greatest) + 1]());

  size_t slots = 16;
  while (slots < merges.size() * 2) slots *= 2;
  pairs_.assign(slots, Pair{kEmpty, 0, 0});
  pair_mask_ = slots - 1;
  uint32_t rank = 0;
  for (const Merge& merge : merges) {
    const uint64_t key = key_of(merge.left, merge.right);
    size_t i = slot_of(key, pair_mask_);
    while (pairs_[i].key != kEmpty && pairs_[i].key != key) i = (i + 1) & pair_mask_;
    pairs_[i] = {key, rank++, merge.merged};
  }
}

const Bpe::Pair* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t key = key_of(left, right);
  for (size_t i = slot_of(key, pair_mask_);; i = (i + 1) & pair_mask_) {
    if (pairs_[i].key == key) return &pairs_[i];
    if (pairs_[i].key == kEmpty) return nullptr;
  }
}

void Bpe::encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* tokens) const {
  const int32_t whole = words_.find(word);
  std::atomic<uint8_t>* reachable = whole < 0 ? nullptr : &reachable_[static_cast<size_t>(whole)];
  const uint8_t known = reachable == nullptr ? 2 : reachable->load(std::memory_order_relaxed);
  if (whole >= 0 && (options_.ignore_merges || known == 1)) {
    tokens->push_back(whole);
    return;
  }
  start(word, scratch);
  if (scratch->ids.size() <= kShort) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
  const std::vector<int32_t>& ids = scratch->ids;
  // Every thread that finds this out finds the same.
  if (known == 0) reachable->store(ids.size() == 1 && ids[0] == whole ? 1 : 2, std::memory_order_relaxed);
  tokens->insert(tokens->end(), ids.begin(), ids.end());
}

void Bpe::start(std::string_view word, Scratch* scratch) const {
  std::vector<int32_t>& ids = scratch->ids;
  ids.clear();
  bool after_unknown = false;
  for (const char c : word) {
    const int32_t id = byte_tokens_[static_cast<uint8_t>(c)];
    if (id >= 0) {
      ids.push_back(id);
    } else if (options_.unknown >= 0 && !(after_unknown && options_.fuse_unknown)) {
      ids.push_back(options_.unknown);
    }
    after_unknown = id < 0;
  }
}

// All pairs' ranks in an array; its least is looked for again after each merge.
void Bpe::merge_short(Scratch* scratch) const {
  std::vector<int32_t>& ids = scratch->ids;
  std::vector<uint32_t>& ranks = scratch->ranks;  // of (ids[i], ids[i + 1])
  std::vector<int32_t>& merged = scratch->merged;
  ranks.assign(ids.size(), kNever);
  merged.assign(ids.size(), -1);
  const auto look = [&](size_t i) {
    const Pair* pair = find(ids[i], ids[i + 1]);
    ranks[i] = pair == nullptr ? kNever : pair->rank;
    merged[i] = pair == nullptr ? -1 : pair->merged;
  };
  for (size_t i = 0; i + 1 < ids.size(); ++i) look(i);
  while (ids.size() > 1) {
    const size_t pairs = ids.size() - 1;
    size_t best = 0;
    for (size_t i = 1; i < pairs; ++i) best = ranks[i] < ranks[best] ? i : best;
    if (ranks[best] == kNever) return;
    const auto at = static_cast<std::ptrdiff_t>(best);
    ids[best] = merged[best];
    ids.erase(ids.begin() + at + 1);
    ranks.erase(ranks.begin() + at);
    merged.erase(merged.begin() + at);
    if (best > 0) look(best - 1);
    if (best + 1 < ids.size()) look(best);
  }
}

// Symbols in a list, candidates in a heap. A candidate whose symbols have changed since is passed over.
void Bpe::merge_long(Scratch* scratch) const {
  using Symbol = Scratch::Symbol;
  using Candidate = Scratch::Candidate;
  std::vector<int32_t>& ids = scratch->ids;
  std::vector<Symbol>& symbols = scratch->symbols;
  std::vector<Candidate>& heap = scratch->heap;
  const auto count = static_cast<int32_t>(ids.size());
  symbols.clear();
  heap.clear();
  for (int32_t i = 0; i < count; ++i) {
    symbols.push_back({ids[static_cast<size_t>(i)], i - 1, i + 1 < count ? i + 1 : -1});
  }
  const auto candidate = [&](int32_t at) {
    const Symbol& left = symbols[static_cast<size_t>(at)];
    const int32_t right = symbols[static_cast<size_t>(left.next)].id;
    const Pair* pair = find(left.id, right);
    if (pair == nullptr) return false;
    heap.push_back({pair->rank, at, left.id, right, pair->merged});
    return true;
  };
  for (int32_t i = 0; i + 1 < count; ++i) candidate(i);
  std::make_heap(heap.begin(), heap.end(), Later{});
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), Later{});
    const Candidate top = heap.back();
    heap.pop_back();
    Symbol& left = symbols[static_cast<size_t>(top.at)];
    if (left.id != top.left || left.next < 0 || symbols[static_cast<size_t>(left.next)].id != top.right) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = top.merged;
    left.next = right.next;
    right.id = -1;  // gone: no candidate has this id
    if (left.next >= 0) {
      symbols[static_cast<size_t>(left.next)].previous = top.at;
      if (candidate(top.at)) std::push_heap(heap.begin(), heap.end(), Later{});
    }
    if (left.previous >= 0 && candidate(left.previous)) std::push_heap(heap.begin(), heap.end(), Later{});
  }
  ids.clear();
  for (int32_t i = 0; i >= 0; i = symbols[static_cast<size_t>(i)].next)
    ids.push_back(symbols[static_cast<size_t>(i)].id);
}

}  // namespace edgec
