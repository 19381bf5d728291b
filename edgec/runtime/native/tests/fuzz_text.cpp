// fuzz_text SEED ITERATIONS [TOKENIZER.json]: hostile input to all that reads text, meant to run under sanitizers.
//
// Each iteration mutates a tokenizer file and parses it as JSON and as a tokenizer; whatever still loads must encode
// and decode, and hold what callers rely on. The unmutated tokenizer sees random text. Ends with 1 when something
// doesn't hold.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "detokenizer.h"
#include "edgec_text.h"
#include "json.h"
#include "philox.h"
#include "status.h"
#include "stop_strings.h"
#include "tokenizer.h"
#include "unicode.h"

namespace {

using edgec::Tokenizer;

const char kSample[] = R"x({"version": "1.0", "truncation": null, "added_tokens": [
  {"id": 12, "content": "<s>", "single_word": false, "lstrip": true, "rstrip": false, "normalized": false, "special": true},
  {"id": 13, "content": "aé ", "single_word": true, "lstrip": false, "rstrip": true, "normalized": true, "special": false}],
  "normalizer": null, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
  {"type": "Split", "pattern": {"Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
  "behavior": "Isolated", "invert": false}, {"type": "ByteLevel", "add_prefix_space": true, "use_regex": false}]},
  "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "dropout": null, "unk_token": "e", "fuse_unk": true,
  "ignore_merges": false, "vocab": {"a": 0, "b": 1, "Ã": 2, "©": 3, "e": 4, "Ġ": 5, "ab": 6, "Ã©": 7, "aa": 8, "Ġa": 9,
  "aaaa": 10, "\u0120ab": 11}, "merges": ["a b", ["Ã", "©"], "a a", "Ġ a", "aa aa", "Ġa b"]}})x";

// Numbers from the seed alone.
class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  uint32_t below(uint32_t n) {
    const auto block = edgec::philox4x32({static_cast<uint32_t>(at_), static_cast<uint32_t>(at_ >> 32), 0, 0},
                                         {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
    ++at_;
    return n == 0 ? 0 : block[0] % n;
  }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t seed_, at_ = 0;
};

void expect(bool condition, const char* what, uint64_t iteration) {
  if (condition) return;
  std::fprintf(stderr, "iteration %" PRIu64 ": %s\n", iteration, what);
  std::exit(1);
}

std::string mutate(std::string text, Random* random) {
  static const char* const kPieces[] = {
      "{",     "}",       "[",    "]",    "\"",   "\\", ",", ":", "null", "1e99", "\\ud800",    "\\u0000", "-1",
      "99999", "4194303", "\xff", "\xc3", "true", " ",  "e", "Ġ", "0",    "\"\"", "2147483648", "<s>",     "[[[[[[[["};
  const uint32_t changes = 1 + random->below(4);
  for (uint32_t i = 0; i < changes && !text.empty(); ++i) {
    const size_t at = random->below(static_cast<uint32_t>(text.size()));
    switch (random->below(6)) {
      case 0:
        text[at] = static_cast<char>(random->below(256));
        break;
      case 1:
        text.erase(at, 1 + random->below(8));
        break;
      case 2:
        text.insert(at, kPieces[random->below(sizeof(kPieces) / sizeof(kPieces[0]))]);
        break;
      case 3:
        text.insert(at, text.substr(random->below(static_cast<uint32_t>(text.size())), random->below(64)));
        break;
      case 4:
        text.replace(at, 1, kPieces[random->below(sizeof(kPieces) / sizeof(kPieces[0]))]);
        break;
      default:
        if (random->one_in(8)) text.resize(at);
        break;
    }
  }
  return text;
}

// Mostly text, sometimes not even UTF-8.
std::string random_text(Random* random) {
  static const char* const kPieces[] = {
      "a",  "b",  "ab",  "é",  " ",  "  ", "\n",     "\r\n", "1",   "23",
      "'s", "'ſ", "<s>", "é ", "한", "😀",  "\u00a0", "!?",   "aé ", "aaaaaaaaaaaaaaaa"};
  std::string text;
  const uint32_t pieces = random->below(30);
  for (uint32_t i = 0; i < pieces; ++i) {
    if (random->one_in(6)) {
      uint32_t c = random->below(0x110000);
      edgec::append_utf8(c >= 0xD800 && c < 0xE000 ? 'x' : c, &text);
    } else {
      text += kPieces[random->below(sizeof(kPieces) / sizeof(kPieces[0]))];
    }
  }
  if (random->one_in(8)) text.push_back(static_cast<char>(random->below(256)));
  if (random->one_in(200)) text += std::string(random->below(20000), 'a');
  return text;
}

// Read every value there is.
void walk(const edgec::JsonValue& value, size_t* seen) {
  ++*seen;
  if (value.is_string()) {
    expect(edgec::find_invalid_utf8(value.as_string()) == std::string_view::npos, "a string is not UTF-8", *seen);
  } else if (value.is_array()) {
    for (const edgec::JsonValue& element : value.elements()) walk(element, seen);
  } else if (value.is_object()) {
    for (const edgec::JsonMember& member : value.members()) walk(member.value, seen);
  }
  if (*seen % 64 == 1) value.path();
}

void use(const Tokenizer& tokenizer, Random* random, uint64_t iteration) {
  const std::string text = random_text(random);
  const bool special = random->one_in(2);
  std::vector<int32_t> tokens;
  try {
    tokens = tokenizer.encode(text, special);
    expect(edgec::find_invalid_utf8(text) == std::string_view::npos, "invalid text was taken", iteration);
  } catch (const edgec::Error& error) {
    expect(error.status() == EDGEC_INVALID_ARGUMENT, "encoding failed otherwise than by its text", iteration);
  }
  for (const int32_t token : tokens) {
    expect(token >= 0 && token < tokenizer.vocab_size(), "a token is not in the vocabulary", iteration);
  }
  while (random->one_in(2)) tokens.push_back(static_cast<int32_t>(random->below(20)) - 2);

  // Streaming gives what the whole gives, in whole characters.
  const std::string whole = tokenizer.decode(tokens.data(), tokens.size(), special);
  std::string wanted, streamed;
  edgec::Utf8Stream stream;
  stream.push(whole, &wanted);
  stream.flush(&wanted);
  edgec::Detokenizer detokenizer(tokenizer, special);
  edgec::StopMatcher matcher(
      std::make_shared<const edgec::StopStrings>(std::vector<std::string>{"ab", "é", "aab", "\n"}));
  std::string out;
  for (const int32_t token : tokens) {
    std::string piece;
    detokenizer.push(token, &piece);
    expect(edgec::find_invalid_utf8(piece) == std::string_view::npos, "a piece splits a character", iteration);
    streamed += piece;
    matcher.push(piece, &out);
  }
  detokenizer.flush(&streamed);
  matcher.flush(&out);
  expect(streamed == wanted, "the pieces are not the whole", iteration);
  expect(streamed.compare(0, out.size(), out) == 0, "stopping changed the text", iteration);
  expect(out.find("ab") == std::string::npos && out.find("é") == std::string::npos, "a stop string is out", iteration);
}

std::string read(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  expect(file != nullptr, "the tokenizer can't be opened", 0);
  std::string text;
  char buffer[4096];
  for (size_t got; (got = std::fread(buffer, 1, sizeof(buffer), file)) > 0;) text.append(buffer, got);
  std::fclose(file);
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: fuzz_text SEED ITERATIONS [TOKENIZER.json]\n");
    return 2;
  }
  Random random(std::strtoull(argv[1], nullptr, 10));
  const uint64_t iterations = std::strtoull(argv[2], nullptr, 10);
  const std::string original = argc > 3 ? read(argv[3]) : kSample;
  const Tokenizer tokenizer = Tokenizer::from_json(original, "original");
  uint64_t parsed = 0, loaded = 0;
  for (uint64_t i = 0; i < iterations; ++i) {
    use(tokenizer, &random, i);
    const std::string text = mutate(original, &random);
    try {
      const edgec::JsonDocument document = edgec::JsonDocument::parse(text, "mutated");
      size_t seen = 0;
      walk(document.root(), &seen);
      ++parsed;
      const Tokenizer mutated = Tokenizer::from_json(text, "mutated");
      ++loaded;
      for (int j = 0; j < 3; ++j) use(mutated, &random, i);
    } catch (const edgec::Error& error) {
      expect(error.status() == EDGEC_CORRUPT || error.status() == EDGEC_UNSUPPORTED, error.what(), i);
    }
  }
  std::printf("%" PRIu64 " iterations: %" PRIu64 " were JSON, %" PRIu64 " were tokenizers\n", iterations, parsed,
              loaded);
  return 0;
}
