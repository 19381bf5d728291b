// What text processing has to know of Unicode: decoding UTF-8, and the classes that tokenizers' regexes name.
//
// The classes are those of Hugging Face's `tokenizers`, which has two opinions of them: its regex engine's (\p{L},
// \p{N}, \s) and its language's (numeric, white space, \w). The table is generated from that library by
// scripts/unicode_tables.py, so that unassigned and recent code points are classed as there.
#ifndef EDGEC_UNICODE_H_
#define EDGEC_UNICODE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace edgec {

enum CharClass : uint8_t {
  kLetter = 1,       // \p{L} in a Split or ByteLevel regex
  kNumber = 2,       // \p{N} there
  kSpace = 4,        // \s there
  kNumeric = 8,      // Digits
  kWhiteSpace = 16,  // what lstrip and rstrip of an added token take
  kWord = 32,        // \w beside an added token with single_word
};

// Bits of CharClass; 0 for anything above U+10FFFF.
uint8_t char_class(uint32_t code_point);

// The character at the start of `text` (not empty): its bytes, 1 to 4, and its code point; 0 when it isn't one: a stray
// continuation, an overlong form, a surrogate, above U+10FFFF, or cut short.
inline int decode_utf8(const char* text, size_t bytes, uint32_t* code_point) {
  const auto* p = reinterpret_cast<const uint8_t*>(text);
  const uint32_t a = p[0];
  const auto tail = [&](size_t i) { return (p[i] & 0xC0u) == 0x80u; };
  if (a < 0x80) {
    *code_point = a;
    return 1;
  }
  if (a < 0xC2) return 0;
  if (a < 0xE0) {
    if (bytes < 2 || !tail(1)) return 0;
    *code_point = (a & 0x1F) << 6 | (p[1] & 0x3Fu);
    return 2;
  }
  if (a < 0xF0) {
    if (bytes < 3 || !tail(1) || !tail(2)) return 0;
    const uint32_t c = (a & 0x0F) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    if (c < 0x800 || (c >= 0xD800 && c < 0xE000)) return 0;
    *code_point = c;
    return 3;
  }
  if (a > 0xF4 || bytes < 4 || !tail(1) || !tail(2) || !tail(3)) return 0;
  const uint32_t c = (a & 0x07) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
  if (c < 0x10000 || c > 0x10FFFF) return 0;
  *code_point = c;
  return 4;
}

// Append a code point, at most U+10FFFF, as UTF-8.
void append_utf8(uint32_t code_point, std::string* out);

// The offset of the first byte that isn't valid UTF-8; npos when all are.
size_t find_invalid_utf8(std::string_view text);

}  // namespace edgec

#endif  // EDGEC_UNICODE_H_
