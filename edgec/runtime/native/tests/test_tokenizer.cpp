#include <string>
#include <vector>

#include "check.h"
#include "json.h"
#include "pretokenizer.h"
#include "status.h"
#include "tokenizer.h"
#include "unicode.h"

using edgec::Tokenizer;

namespace {

// Bytes a–e and the space, merges, two added tokens; everything else of a file as small as it can be.
std::string file(const std::string& merges = R"(["a b", "ab c", "a a"])", const std::string& more = "",
                 const std::string& pre = R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})") {
  return R"({"added_tokens": [{"id": 10, "content": "<s>", "special": true, "normalized": false},
    {"id": 11, "content": "<pad>", "special": false, "normalized": true}],
    "normalizer": null, "post_processor": null, "decoder": {"type": "ByteLevel"}, "pre_tokenizer": )" +
         pre +
         R"(, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "Ġ": 5, "ab": 6, "abc": 7,
    "aa": 8, "Ġd": 9}, "merges": )" +
         merges + more + "}}";
}

Tokenizer make(const std::string& text) { return Tokenizer::from_json(text, "tokenizer.json"); }

std::string encode(const Tokenizer& tokenizer, const std::string& text, bool special = true) {
  std::string ids;
  for (const int32_t id : tokenizer.encode(text, special)) ids += std::to_string(id) + " ";
  return ids;
}

std::string words(const std::string& pre_tokenizer, const std::string& text) {
  const edgec::JsonDocument document = edgec::JsonDocument::parse(pre_tokenizer, "pre");
  edgec::Words words;
  edgec::PreTokenizer::from_json(document.root()).split(text, &words);
  std::string joined;
  for (const std::string_view word : words.words) joined += "[" + std::string(word) + "]";
  return joined;
}

const std::string kGpt2 = R"({"type": "ByteLevel", "add_prefix_space": false})";
const std::string kLlama3 =
    R"x({"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated", "invert": false, "pattern":
    {"Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})x";

}  // namespace

TEST(tokenizer_merges_by_rank_then_from_the_left) {
  const Tokenizer tokenizer = make(file());
  CHECK_EQ(encode(tokenizer, "abc"), std::string("7 "));
  CHECK_EQ(encode(tokenizer, "aab"), std::string("0 6 "));  // "a b" has the lower rank
  CHECK_EQ(encode(tokenizer, "aaa"), std::string("8 0 "));  // leftmost first
  CHECK_EQ(encode(tokenizer, " d"), std::string("5 3 "));   // "Ġd" is a token that no merge makes
  CHECK_EQ(encode(tokenizer, "a!b"), std::string("0 1 "));  // a byte without a token is dropped
  CHECK_EQ(encode(tokenizer, ""), std::string(""));
}

TEST(tokenizer_reads_merges_as_pairs_too) {
  const Tokenizer tokenizer = make(file(R"([["a", "b"], ["ab", "c"], ["a", "a"]])"));
  CHECK_EQ(encode(tokenizer, "abcaa"), std::string("7 8 "));
}

TEST(tokenizer_ignore_merges_takes_whole_words) {
  const Tokenizer tokenizer = make(file(R"(["a b"])", R"(, "ignore_merges": true)"));
  CHECK_EQ(encode(tokenizer, "abc d"), std::string("7 9 "));
  CHECK_EQ(encode(tokenizer, "abcc"), std::string("6 2 2 "));
}

TEST(tokenizer_long_words_equal_short_ones) {
  const Tokenizer tokenizer = make(file());
  std::string text, ids;
  for (int i = 0; i < 1000; ++i) {
    text += i % 3 == 0 ? "abc" : "aab";
    ids += i % 3 == 0 ? "7 " : "0 6 ";
  }
  CHECK_EQ(encode(tokenizer, text), ids);
}

TEST(tokenizer_finds_special_tokens_only_when_asked) {
  const Tokenizer tokenizer = make(file());
  CHECK_EQ(encode(tokenizer, "a<s>b<pad>", true), std::string("0 10 1 11 "));
  CHECK_EQ(encode(tokenizer, "a<s>b<pad>", false), std::string("0 1 11 "));  // < s > have no tokens here
  CHECK(tokenizer.is_special(10));
  CHECK(!tokenizer.is_special(11));
  CHECK(!tokenizer.is_special(-1));
  CHECK(!tokenizer.is_special(12));
  CHECK_EQ(tokenizer.vocab_size(), 12);
}

TEST(tokenizer_decodes_bytes_and_skips_what_it_is_told) {
  const Tokenizer tokenizer = make(file());
  const int32_t tokens[] = {10, 7, 9, 11, -5, 99};
  CHECK_EQ(tokenizer.decode(tokens, 6, false), std::string("<s>abc d<pad>"));
  CHECK_EQ(tokenizer.decode(tokens, 6, true), std::string("abc d<pad>"));
}

TEST(tokenizer_refuses_invalid_utf8) {
  const Tokenizer tokenizer = make(file());
  for (const char* bad : {"a\xff", "\xc3", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\xaf"}) {
    CHECK_THROWS(tokenizer.encode(bad, true), EDGEC_INVALID_ARGUMENT);
  }
}

TEST(tokenizer_refuses_files_that_contradict_themselves) {
  CHECK_THROWS(make(file(R"(["a x"])")), EDGEC_CORRUPT);
  CHECK_THROWS(make(file(R"(["a d"])")), EDGEC_CORRUPT);  // "ad" is no token
  CHECK_THROWS(make(file(R"(["a b c"])")), EDGEC_CORRUPT);
  CHECK_THROWS(make(file(R"([["a"]])")), EDGEC_CORRUPT);
  CHECK_THROWS(make(file(R"([1])")), EDGEC_CORRUPT);
  CHECK_THROWS(make(file("[]", R"(, "unk_token": "?")")), EDGEC_CORRUPT);
  CHECK_THROWS(make("[]"), EDGEC_CORRUPT);
  CHECK_THROWS(make("{}"), EDGEC_UNSUPPORTED);
  std::string twice = file();
  twice.replace(twice.find("\"b\": 1"), 6, "\"b\": 0");
  CHECK_THROWS(make(twice), EDGEC_CORRUPT);
  std::string huge = file();
  huge.replace(huge.find("\"b\": 1"), 6, "\"b\": 999999999999");
  CHECK_THROWS(make(huge), EDGEC_CORRUPT);
  CHECK_THROWS(Tokenizer::from_file("/nonexistent/tokenizer.json"), EDGEC_NOT_FOUND);
  CHECK_THROWS(Tokenizer::from_file("/"), EDGEC_IO);
}

TEST(tokenizer_refuses_what_it_would_do_differently) {
  CHECK_THROWS(make(file("[]", R"(, "dropout": 0.1)")), EDGEC_UNSUPPORTED);
  CHECK_THROWS(make(file("[]", R"(, "byte_fallback": true)")), EDGEC_UNSUPPORTED);
  CHECK_THROWS(make(file("[]", R"(, "continuing_subword_prefix": "##")")), EDGEC_UNSUPPORTED);
  CHECK_THROWS(make(file("[]", "", "null")), EDGEC_UNSUPPORTED);
  CHECK_THROWS(make(file("[]", "", R"({"type": "Whitespace"})")), EDGEC_UNSUPPORTED);
  CHECK_THROWS(make(file("[]", "", R"({"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated"})")),
               EDGEC_UNSUPPORTED);
}

TEST(pretokenizer_gpt2_leaves_one_space_to_the_word) {
  CHECK_EQ(words(kGpt2, "Hello  world's 12 3!? \n\n x\t"),
           std::string("[Hello][ ][ world]['s][ 12][ 3][!?][ \n\n][ x][\t]"));
  CHECK_EQ(words(kGpt2, "don't  'S"), std::string("[don]['t][ ][ '][S]"));
  CHECK_EQ(words(kGpt2, "a\r\nb"), std::string("[a][\r][\n][b]"));
}

TEST(pretokenizer_llama3_splits_digits_by_three_and_keeps_line_breaks) {
  CHECK_EQ(words(kLlama3, "I'LL pay 12345$\n\n  for  it"),
           std::string("[I]['LL][ pay][ ][123][45][$\n\n][ ][ for][ ][ it]"));
  CHECK_EQ(words(kLlama3, "a \n \n  b"), std::string("[a][ \n \n][ ][ b]"));
  CHECK_EQ(words(kLlama3, "'\xC5\xBFx"), std::string("['\xC5\xBF][x]"));  // ſ is an s when case doesn't count
}

TEST(unicode_classes_of_the_fast_paths_are_those_of_the_table) {
  // The ranges that char_class answers without looking: each end, and their neighbours, against what is known of them.
  for (const uint32_t c : {0x4E00u, 0x9FFFu, 0xAC00u, 0xD7A3u}) {
    CHECK_EQ(int{edgec::char_class(c)}, int{edgec::kLetter | edgec::kWord});
  }
  CHECK_EQ(int{edgec::char_class(0x4DFF)}, 0);  // a hexagram: a symbol
  CHECK_EQ(int{edgec::char_class(0xD7A4)}, 0);  // unassigned
  CHECK_EQ(int{edgec::char_class(0x110000)}, 0);
  CHECK_EQ(int{edgec::char_class('7')}, int{edgec::kNumber | edgec::kNumeric | edgec::kWord});
  CHECK_EQ(int{edgec::char_class(0xA0)}, int{edgec::kSpace | edgec::kWhiteSpace});
}
