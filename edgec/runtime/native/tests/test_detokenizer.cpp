#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "detokenizer.h"
#include "stop_strings.h"

using edgec::StopMatcher;
using edgec::StopStrings;
using edgec::Utf8Stream;

namespace {

// All that a stream gives for `bytes`, cut into pieces of `size`.
std::string streamed(const std::string& bytes, size_t size) {
  Utf8Stream stream;
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += size) stream.push(std::string_view(bytes).substr(i, size), &out);
  stream.flush(&out);
  return out;
}

std::string stopped(const std::vector<std::string>& stop, const std::string& text, size_t size) {
  StopMatcher matcher(std::make_shared<const StopStrings>(stop));
  std::string out;
  for (size_t i = 0; i < text.size(); i += size) {
    if (matcher.push(std::string_view(text).substr(i, size), &out)) return out + "|";
  }
  matcher.flush(&out);
  return out;
}

const std::string kBad = "\xEF\xBF\xBD";

}  // namespace

TEST(utf8_stream_never_splits_a_character) {
  const std::string text = "a한글😀é";
  Utf8Stream stream;
  std::string all;
  for (const char byte : text) {
    std::string piece;
    stream.push(std::string_view(&byte, 1), &piece);
    CHECK(piece.empty() || text.find(piece) != std::string::npos);
    all += piece;
  }
  CHECK_EQ(all, text);
}

TEST(utf8_stream_replaces_as_python_does) {
  // Right sides: bytes.decode("utf-8", errors="replace").
  const std::pair<std::string, std::string> cases[] = {
      {"a\xff"
       "b",
       "a" + kBad + "b"},
      {"\xe2\x82", kBad},
      {"\xe2\x82z", kBad + "z"},
      {"\xe2\x28\xa1", kBad + "(" + kBad},
      {"\xf0\x9f\x98", kBad},
      {"\xf0\x9f\x98\xf0\x9f\x98\x80", kBad + "😀"},
      {"\xc0\xaf", kBad + kBad},
      {"\xed\xa0\x80", kBad + kBad + kBad},
      {"\xf4\x90\x80\x80", kBad + kBad + kBad + kBad},
      {"\x80\x80", kBad + kBad},
      {"\xe0\x80\x80", kBad + kBad + kBad},
      {"\xc3\xc3\xa9", kBad + "é"},
  };
  for (const auto& [bytes, text] : cases) {
    for (size_t size = 1; size <= 4; ++size) CHECK_EQ(streamed(bytes, size), text);
  }
}

TEST(utf8_stream_waits_only_while_a_byte_could_complete_it) {
  Utf8Stream stream;
  std::string out;
  stream.push("\xe2\x82", &out);
  CHECK_EQ(out, std::string());
  stream.push("\xff", &out);
  CHECK_EQ(out, kBad + kBad);
  out.clear();
  stream.push("\xed\xa0", &out);  // a surrogate: nothing can complete it
  CHECK_EQ(out, kBad + kBad);
}

TEST(stop_strings_end_the_text_wherever_it_is_cut) {
  for (size_t size = 1; size < 12; ++size) {
    CHECK_EQ(stopped({"STOP"}, "a S ST STO STOP b", size), std::string("a S ST STO |"));
    CHECK_EQ(stopped({"STOP"}, "a ST", size), std::string("a ST"));
    CHECK_EQ(stopped({"aab"}, "aaaab", size), std::string("aa|"));
    CHECK_EQ(stopped({"abab!", "bac"}, "xababacx", size), std::string("xaba|"));
    CHECK_EQ(stopped({"\n\n", "###"}, "x\n#\n##\n\n", size), std::string("x\n#\n##|"));
  }
}

TEST(stop_strings_first_complete_wins_then_the_longer) {
  for (size_t size = 1; size < 8; ++size) {
    CHECK_EQ(stopped({"abcd", "bc"}, "xabcd", size), std::string("xa|"));
    CHECK_EQ(stopped({"cd", "abcd", "d"}, "xabcd", size), std::string("x|"));
    CHECK_EQ(stopped({"abc", "abc"}, "abc", size), std::string("|"));
  }
}

TEST(stop_strings_hold_back_no_more_than_they_must) {
  StopMatcher matcher(std::make_shared<const StopStrings>(std::vector<std::string>{"</s>"}));
  std::string out;
  matcher.push("hello <", &out);
  CHECK_EQ(out, std::string("hello "));
  matcher.push("/", &out);
  CHECK_EQ(out, std::string("hello "));
  matcher.push("b", &out);
  CHECK_EQ(out, std::string("hello </b"));
  CHECK(matcher.push("</s> more", &out));
  CHECK(matcher.push("again", &out));
  matcher.flush(&out);
  CHECK_EQ(out, std::string("hello </b"));
}

TEST(stop_strings_none_passes_everything) {
  StopMatcher matcher(std::make_shared<const StopStrings>(std::vector<std::string>{}));
  std::string out;
  CHECK(!matcher.push("text", &out));
  CHECK_EQ(out, std::string("text"));
}
