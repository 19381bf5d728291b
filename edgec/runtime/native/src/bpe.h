// Byte-pair merging (Sennrich et al., 2016): of all neighbours that may merge, the pair with the lowest rank, leftmost
// first.
#ifndef EDGEC_BPE_H_
#define EDGEC_BPE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "string_table.h"

namespace edgec {

class Bpe {
 public:
  struct Merge {
    int32_t left, right, merged;
  };
  struct Word {
    std::string_view bytes;  // must outlive the Bpe
    int32_t id;
  };
  struct Options {
    bool ignore_merges = false;  // a word that is a token is that token, whatever merging gives
    bool fuse_unknown = false;   // a run of unknown bytes is one unknown token
    int32_t unknown = -1;        // the token for a byte without one; −1: such bytes are dropped
  };

  Bpe() = default;

  // `vocabulary`: the model's tokens as the bytes they stand for; those that can't come from bytes left out. `merges`
  // in the order of their ranks; a pair that stands twice has its last rank. `byte_tokens[b]`: b's token, or −1.
  Bpe(const std::vector<Word>& vocabulary, const std::vector<Merge>& merges,
      const std::array<int32_t, 256>& byte_tokens, Options options);

  // Buffers of one encoding, reused from word to word.
  struct Scratch {
    struct Symbol {
      int32_t id;
      int32_t previous, next;  // −1: none
    };
    struct Candidate {
      uint32_t rank;
      int32_t at;           // its left symbol
      int32_t left, right;  // what the symbols must still be
      int32_t merged;
    };
    std::vector<int32_t> ids;
    std::vector<uint32_t> ranks;
    std::vector<int32_t> merged;
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // Append the tokens of `word` (not empty). O(n log n) in its bytes.
  void encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* tokens) const;

 private:
  struct Pair {
    uint64_t key;  // left << 32 | right; kEmpty: a free slot
    uint32_t rank;
    int32_t merged;
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static constexpr size_t kShort = 32;  // symbols up to which looking at all pairs beats a heap

  const Pair* find(int32_t left, int32_t right) const;
  void start(std::string_view word, Scratch* scratch) const;
  void merge_short(Scratch* scratch) const;
  void merge_long(Scratch* scratch) const;

  Options options_;
  std::array<int32_t, 256> byte_tokens_{};
  std::vector<Pair> pairs_;  // open addressing, a power of two
  size_t pair_mask_ = 0;
  StringTable words_;

  // Whether merging a token's own bytes gives that token (nearly always), found out when it is first met: then a word
  // that is a token needs no merging. 0 not known, 1 yes, 2 no.
  std::unique_ptr<std::atomic<uint8_t>[]> reachable_;
};

}  // namespace edgec

#endif  // EDGEC_BPE_H_
