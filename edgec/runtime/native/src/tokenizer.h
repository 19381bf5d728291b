// Byte-level BPE from a tokenizer.json, token for token what Hugging Face's `tokenizers` gives
// (add_special_tokens=False).
//
// What isn't known here (another model, normalizer, regex, decoder) is Error(EDGEC_UNSUPPORTED) when it is loaded,
// never a silent difference. Immutable after construction but for a memo of relaxed atomics: any number of threads may
// use one.
#ifndef EDGEC_TOKENIZER_H_
#define EDGEC_TOKENIZER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.h"
#include "bpe.h"
#include "pretokenizer.h"

namespace edgec {

class Tokenizer {
 public:
  // Throws Error: NOT_FOUND or IO (the file), CORRUPT (not JSON, ids that clash, merges of unknown tokens),
  // UNSUPPORTED (valid, but not byte-level BPE as above).
  static Tokenizer from_file(const std::string& path);
  static Tokenizer from_json(std::string text, std::string name);

  // Tokens of `text` (UTF-8; invalid: Error(EDGEC_INVALID_ARGUMENT) with the byte's offset). `special`: special tokens
  // written out in the text are recognised; otherwise they are text like any other.
  std::vector<int32_t> encode(std::string_view text, bool special) const;

  // The bytes of `tokens`, not necessarily valid UTF-8. Unknown ids are skipped.
  std::string decode(const int32_t* tokens, size_t count, bool skip_special) const;

  std::string_view token_bytes(int32_t token) const;  // "" for an id outside the vocabulary
  bool is_special(int32_t token) const;
  int32_t vocab_size() const { return static_cast<int32_t>(offsets_.size()) - 1; }  // greatest id + 1

 private:
  Tokenizer() = default;

  PreTokenizer pretokenizer_;
  AddedTokens added_;
  Bpe bpe_;
  std::vector<char> bytes_;        // of all tokens, one after the other; a vector, because a move must not move them
  std::vector<uint32_t> offsets_;  // (vocab + 1)
  std::vector<bool> special_;      // (vocab)
};

}  // namespace edgec

// The ABI's handle, here so that the engine can own one.
struct edgec_tokenizer {
  edgec::Tokenizer tokenizer;
};

#endif  // EDGEC_TOKENIZER_H_
