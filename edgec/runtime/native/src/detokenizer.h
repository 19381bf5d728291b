// Tokens to text as they come, never splitting a character.
//
// The pieces, joined, equal the whole answer's bytes decoded as Python's bytes.decode("utf-8", errors="replace") does:
// bytes that can't be UTF-8 become U+FFFD, one for each maximal part of a character (Unicode 15, table 3-8), but only
// once no further byte could complete them.
#ifndef EDGEC_DETOKENIZER_H_
#define EDGEC_DETOKENIZER_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace edgec {

class Tokenizer;

// Bytes in, whole characters out.
class Utf8Stream {
 public:
  void push(std::string_view bytes, std::string* out);
  void flush(std::string* out);  // what is still incomplete becomes U+FFFD

 private:
  char pending_[4];
  int pending_bytes_ = 0;  // of a character that has begun, valid so far
};

class Detokenizer {
 public:
  // The tokenizer must outlive it. `skip_special`: leave special tokens out of the text.
  Detokenizer(const Tokenizer& tokenizer, bool skip_special) : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  // Append the characters that `token` completed. Ids outside the vocabulary are no text, as in Hugging Face's decode.
  void push(int32_t token, std::string* out);
  void flush(std::string* out) { stream_.flush(out); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  Utf8Stream stream_;
};

}  // namespace edgec

#endif  // EDGEC_DETOKENIZER_H_
