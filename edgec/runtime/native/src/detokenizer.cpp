#include "detokenizer.h"

#include "tokenizer.h"
#include "unicode.h"

namespace edgec {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// How many bytes at the start of `text`, which isn't a whole character, could begin one; at least 1. `open` when more
// bytes could complete it.
size_t valid_part(std::string_view text, bool* open) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t a = byte(0);
  size_t wanted = a >= 0xF0 ? 4 : a >= 0xE0 ? 3 : 2;
  *open = false;
  if (a < 0xC2 || a > 0xF4) return 1;
  uint8_t low = 0x80, high = 0xBF;  // of the second byte: no overlong forms, no surrogates, nothing above U+10FFFF
  if (a == 0xE0) low = 0xA0;
  if (a == 0xED) high = 0x9F;
  if (a == 0xF0) low = 0x90;
  if (a == 0xF4) high = 0x8F;
  size_t i = 1;
  for (; i < text.size() && i < wanted; ++i) {
    if (byte(i) < low || byte(i) > high) return i;
    low = 0x80;
    high = 0xBF;
  }
  *open = true;  // the text ended first, or it would have been a character
  return i;
}

}  // namespace

void Utf8Stream::push(std::string_view bytes, std::string* out) {
  std::string joined;
  if (pending_bytes_ > 0) {
    joined.assign(pending_, static_cast<size_t>(pending_bytes_));
    joined.append(bytes);
    bytes = joined;
    pending_bytes_ = 0;
  }
  while (!bytes.empty()) {
    const size_t valid = find_invalid_utf8(bytes);
    out->append(bytes.substr(0, valid));
    if (valid == std::string_view::npos) return;
    bytes.remove_prefix(valid);
    bool open = false;
    const size_t part = valid_part(bytes, &open);
    if (open) {
      pending_bytes_ = static_cast<int>(bytes.copy(pending_, sizeof(pending_)));
      return;
    }
    out->append(kReplacement);
    bytes.remove_prefix(part);
  }
}

void Utf8Stream::flush(std::string* out) {
  if (pending_bytes_ > 0) out->append(kReplacement);
  pending_bytes_ = 0;
}

void Detokenizer::push(int32_t token, std::string* out) {
  if (skip_special_ && tokenizer_->is_special(token)) return;
  stream_.push(tokenizer_->token_bytes(token), out);
}

}  // namespace edgec
