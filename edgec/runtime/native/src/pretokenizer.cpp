#include "pretokenizer.h"

#include "status.h"
#include "unicode.h"

namespace edgec {
namespace {

// The regexes that are known, as they stand in tokenizer.json files. Some are written differently and match the same.
constexpr const char* kGpt2Regexes[] = {
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
    R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
};
constexpr const char* kLlama3Regexes[] = {
    // Llama 3, and GPT-4's as it is usually converted
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    // GPT-4 (cl100k), as tiktoken has it
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)",
};
constexpr const char* kQwen2Regexes[] = {
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
};

struct Char {
  uint32_t code_point;
  uint8_t classes;
  uint8_t bytes;  // 0: the end of the text

  bool letter() const { return (classes & kLetter) != 0; }
  bool number() const { return (classes & kNumber) != 0; }
  bool space() const { return (classes & kSpace) != 0; }
  bool other() const { return bytes != 0 && (classes & (kLetter | kNumber | kSpace)) == 0; }
  bool line_break() const { return code_point == '\n' || code_point == '\r'; }
};

// The text being cut, and where we are in it.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : text_(text) {}

  Char at(size_t i) const {
    if (i >= text_.size()) return {0, 0, 0};
    const auto first = static_cast<uint8_t>(text_[i]);
    if (first < 0x80) return {first, char_class(first), 1};
    uint32_t c = 0;
    const int bytes = decode_utf8(text_.data() + i, text_.size() - i, &c);
    return {c, char_class(c), static_cast<uint8_t>(bytes == 0 ? 1 : bytes)};
  }

  // The end of the run, from `i`, of characters for which `wanted` holds.
  template <typename Wanted>
  size_t run(size_t i, Wanted wanted) const {
    for (;;) {
      const Char c = at(i);
      if (c.bytes == 0 || !wanted(c)) return i;
      i += c.bytes;
    }
  }

  std::string_view text_;
};

// 's 't 'm 'd 're 've 'll at `i`: its length, or 0. With `fold` as under (?i:…), where ſ counts as an s.
size_t contraction(const Cursor& cursor, size_t i, bool fold) {
  const std::string_view text = cursor.text_;
  if (text[i] != '\'' || i + 1 >= text.size()) return 0;
  const auto lower = [&](size_t at) {
    const char c = at < text.size() ? text[at] : '\0';
    return fold && c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
  };
  const char a = lower(i + 1), b = lower(i + 2);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
  if (fold && text.substr(i + 1, 2) == "\xC5\xBF") return 3;
  return 0;
}

// \s+(?!\S)|\s+ : white space from `i` to `end`. Before a character it leaves the last one to it.
size_t space_run(const Cursor& cursor, size_t i, size_t end) {
  if (end == cursor.text_.size()) return end;
  size_t last = end - 1;
  while ((static_cast<uint8_t>(cursor.text_[last]) & 0xC0) == 0x80) --last;
  return last > i ? last : end;
}

// The end of the word that starts at `i`, by GPT-2's regex.
size_t gpt2_word(const Cursor& cursor, size_t i) {
  if (const size_t bytes = contraction(cursor, i, false)) return i + bytes;
  Char c = cursor.at(i);
  size_t start = i;
  if (c.code_point == ' ') {
    const Char next = cursor.at(i + 1);
    if (next.bytes != 0 && !next.space()) {
      c = next;
      start = i + 1;
    }
  }
  if (c.letter()) return cursor.run(start, [](const Char& x) { return x.letter(); });
  if (c.number()) return cursor.run(start, [](const Char& x) { return x.number(); });
  if (c.other()) return cursor.run(start, [](const Char& x) { return x.other(); });
  return space_run(cursor, i, cursor.run(i, [](const Char& x) { return x.space(); }));
}

// The same by Llama 3's regex, with at most `digits` numbers in a word.
size_t llama3_word(const Cursor& cursor, size_t i, int digits) {
  if (const size_t bytes = contraction(cursor, i, true)) return i + bytes;
  const auto letter = [](const Char& x) { return x.letter(); };
  const Char c = cursor.at(i);
  const Char next = cursor.at(i + c.bytes);
  if (c.letter()) return cursor.run(i, letter);
  if (c.number()) {
    size_t end = i;
    Char x = c;
    for (int n = 0; n < digits && x.number(); ++n) {
      end += x.bytes;
      x = cursor.at(end);
    }
    return end;
  }
  if (!c.line_break() && next.letter()) return cursor.run(i + c.bytes, letter);
  if (c.other() || (c.code_point == ' ' && next.other())) {
    const size_t end = cursor.run(c.other() ? i : i + 1, [](const Char& x) { return x.other(); });
    return cursor.run(end, [](const Char& x) { return x.line_break(); });
  }
  // \s*[\r\n]+ : up to the last line break of the run, when it has one.
  size_t after_break = 0;
  size_t end = i;
  for (Char x = c; x.bytes != 0 && x.space(); x = cursor.at(end)) {
    end += x.bytes;
    if (x.line_break()) after_break = end;
  }
  return after_break != 0 ? after_break : space_run(cursor, i, end);
}

// Cut `text` into words by a function that gives the end of the one at an offset.
template <typename Word>
void cut(std::string_view text, std::vector<std::string_view>* words, Word word) {
  const Cursor cursor(text);
  for (size_t i = 0; i < text.size();) {
    const size_t end = word(cursor, i);
    words->push_back(text.substr(i, end - i));
    i = end;
  }
}

size_t digits_word(const Cursor& cursor, size_t i, bool alone) {
  const Char c = cursor.at(i);
  const bool numeric = (c.classes & kNumeric) != 0;
  if (numeric && alone) return i + c.bytes;
  return cursor.run(i, [&](const Char& x) { return ((x.classes & kNumeric) != 0) == numeric; });
}

[[noreturn]] void unsupported(const std::string& what) {
  throw Error(EDGEC_UNSUPPORTED, "the tokenizer's pre-tokenizer " + what);
}

}  // namespace

PreTokenizer PreTokenizer::from_json(const JsonValue& value) {
  PreTokenizer result;
  bool byte_level = false;
  if (!value.is_null()) add_steps(value, &result.steps_, &byte_level);
  if (!byte_level) unsupported("has no ByteLevel: only byte-level tokenizers are supported");
  return result;
}

void PreTokenizer::add_steps(const JsonValue& value, std::vector<Step>* steps, bool* byte_level) {
  const std::string type(value.at("type").as_string());
  if (type == "Sequence") {
    for (const JsonValue& part : value.at("pretokenizers").elements()) add_steps(part, steps, byte_level);
    return;
  }
  if (*byte_level) unsupported("has " + type + " after ByteLevel, where only the end can be");
  if (type == "ByteLevel") {
    if (value.get_bool("add_prefix_space", true)) steps->push_back(Step::kPrefixSpace);
    if (value.get_bool("use_regex", true)) steps->push_back(Step::kGpt2);
    *byte_level = true;
  } else if (type == "Digits") {
    steps->push_back(value.get_bool("individual_digits", false) ? Step::kDigits : Step::kDigitRuns);
  } else if (type == "Split") {
    const JsonValue pattern = value.at("pattern");
    if (!pattern.has("Regex")) unsupported("splits at a fixed string, which isn't supported");
    const std::string regex(pattern.at("Regex").as_string());
    const std::string behavior(value.at("behavior").as_string());
    // The known regexes match everything, so keeping only the matches is the same as isolating them.
    const bool keeps_matches = behavior == "Isolated" || (behavior == "Removed" && value.get_bool("invert", false));
    if (!keeps_matches) unsupported("has a Split with the behavior " + behavior + ", which isn't supported");
    const auto is = [&](const auto& known) {
      for (const char* text : known) {
        if (regex == text) return true;
      }
      return false;
    };
    if (is(kGpt2Regexes)) {
      steps->push_back(Step::kGpt2);
    } else if (is(kLlama3Regexes)) {
      steps->push_back(Step::kLlama3);
    } else if (is(kQwen2Regexes)) {
      steps->push_back(Step::kQwen2);
    } else {
      unsupported("splits by a regex that isn't known: " + regex);
    }
  } else {
    unsupported("is " + type + ", which isn't supported");
  }
  if (steps->size() > 8) unsupported("has too many steps");
}

void PreTokenizer::split(std::string_view text, Words* words) const {
  words->storage.clear();
  words->words.assign(1, text);
  for (const Step step : steps_) {
    words->scratch.clear();
    std::vector<std::string_view>* out = &words->scratch;
    for (const std::string_view piece : words->words) {
      switch (step) {
        case Step::kDigits:
          cut(piece, out, [](const Cursor& c, size_t i) { return digits_word(c, i, true); });
          break;
        case Step::kDigitRuns:
          cut(piece, out, [](const Cursor& c, size_t i) { return digits_word(c, i, false); });
          break;
        case Step::kPrefixSpace:
          if (piece[0] == ' ') {
            out->push_back(piece);
          } else {
            words->storage.push_back(" " + std::string(piece));
            out->push_back(words->storage.back());
          }
          break;
        case Step::kGpt2:
          cut(piece, out, gpt2_word);
          break;
        case Step::kLlama3:
          cut(piece, out, [](const Cursor& c, size_t i) { return llama3_word(c, i, 3); });
          break;
        case Step::kQwen2:
          cut(piece, out, [](const Cursor& c, size_t i) { return llama3_word(c, i, 1); });
          break;
      }
    }
    words->words.swap(words->scratch);
  }
}

}  // namespace edgec
