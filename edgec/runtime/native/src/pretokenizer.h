// How text is cut into words before it is merged: the `pre_tokenizer` of a tokenizer.json.
//
// A regex engine would be larger than the rest of the tokenizer, and the regexes in use are few; each is written out by
// hand. A regex that isn't one of them is refused when the tokenizer is loaded.
#ifndef EDGEC_PRETOKENIZER_H_
#define EDGEC_PRETOKENIZER_H_

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"

namespace edgec {

// Words, as views of the text that was split or of `storage` (where a space was put before a word).
struct Words {
  std::vector<std::string_view> words;
  std::vector<std::string_view> scratch;
  std::deque<std::string> storage;
};

class PreTokenizer {
 public:
  PreTokenizer() = default;

  // `value` is the file's `pre_tokenizer`. Throws Error(EDGEC_UNSUPPORTED) for what isn't known, and for a pipeline in
  // which ByteLevel doesn't come once, at the end.
  static PreTokenizer from_json(const JsonValue& value);

  // Replace words->words by the words of `text` (valid UTF-8, not empty).
  void split(std::string_view text, Words* words) const;

 private:
  enum class Step : uint8_t {
    kDigits,       // Digits: each numeric character alone
    kDigitRuns,    // Digits, individual_digits false
    kPrefixSpace,  // ByteLevel's add_prefix_space, of each piece that there is then
    kGpt2,         // the regexes, see pretokenizer.cpp
    kLlama3,
    kQwen2,
  };
  static void add_steps(const JsonValue& value, std::vector<Step>* steps, bool* byte_level);

  std::vector<Step> steps_;
};

}  // namespace edgec

#endif  // EDGEC_PRETOKENIZER_H_
