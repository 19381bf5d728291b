#include "unicode.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace edgec {
namespace {

// A run of equal classes: its first code point << 8 | its class bits. Runs cover everything from 0.
constexpr uint32_t kRuns[] = {
#include "unicode_tables.inc"
};

// Classes of U+0000 … U+007F, copied from the runs when compiled.
struct AsciiTable {
  uint8_t bits[128] = {};
  constexpr AsciiTable() {
    size_t run = 0;
    for (uint32_t c = 0; c < 128; ++c) {
      while (run + 1 < std::size(kRuns) && (kRuns[run + 1] >> 8) <= c) ++run;
      bits[c] = static_cast<uint8_t>(kRuns[run] & 0xFF);
    }
  }
};
constexpr AsciiTable kAscii;

}  // namespace

uint8_t char_class(uint32_t code_point) {
  if (code_point < 128) return kAscii.bits[code_point];
  // Hangul syllables and the common ideographs: letters (and so \w) that would otherwise cost eleven comparisons.
  if (code_point - 0x4E00u < 0x5200u || code_point - 0xAC00u < 0x2BA4u) return kLetter | kWord;
  if (code_point > 0x10FFFF) return 0;
  const uint32_t* run = std::upper_bound(std::begin(kRuns), std::end(kRuns), code_point << 8 | 0xFF) - 1;
  return static_cast<uint8_t>(*run & 0xFF);
}

void append_utf8(uint32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
    return;
  }
  char bytes[4];
  int n = 0;
  if (c < 0x800) {
    bytes[n++] = static_cast<char>(0xC0 | c >> 6);
  } else if (c < 0x10000) {
    bytes[n++] = static_cast<char>(0xE0 | c >> 12);
    bytes[n++] = static_cast<char>(0x80 | (c >> 6 & 0x3F));
  } else {
    bytes[n++] = static_cast<char>(0xF0 | c >> 18);
    bytes[n++] = static_cast<char>(0x80 | (c >> 12 & 0x3F));
    bytes[n++] = static_cast<char>(0x80 | (c >> 6 & 0x3F));
  }
  bytes[n++] = static_cast<char>(0x80 | (c & 0x3F));
  out->append(bytes, static_cast<size_t>(n));
}

size_t find_invalid_utf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    if (i + 8 <= text.size()) {
      uint64_t eight;
      std::memcpy(&eight, text.data() + i, 8);
      if ((eight & 0x8080808080808080u) == 0) {
        i += 8;
        continue;
      }
    }
    uint32_t c;
    const int n = decode_utf8(text.data() + i, text.size() - i, &c);
    if (n == 0) return i;
    i += static_cast<size_t>(n);
  }
  return std::string_view::npos;
}

}  // namespace edgec
