#include <string>

#include "check.h"
#include "json.h"
#include "status.h"

using edgec::JsonDocument;
using edgec::JsonKind;
using edgec::JsonValue;

namespace {

JsonDocument parse(const std::string& text) { return JsonDocument::parse(text, "file.json"); }

std::string message_of(const std::string& text, void (*use)(const JsonValue&)) {
  try {
    const JsonDocument document = parse(text);
    use(document.root());
  } catch (const edgec::Error& error) {
    return error.what();
  }
  return "nothing";
}

double number(const std::string& text) { return parse(text).root().as_double(); }

}  // namespace

TEST(json_reads_every_kind_of_value) {
  const JsonDocument document = parse(R"( {"a": [1, -2.5, "x", null, true, false], "b": {"c": {}}, "d": []} )");
  const JsonValue root = document.root();
  CHECK_EQ(root.size(), size_t{3});
  const JsonValue a = root.at("a");
  CHECK_EQ(a.size(), size_t{6});
  const JsonKind kinds[] = {JsonKind::kInteger, JsonKind::kDouble, JsonKind::kString,
                            JsonKind::kNull,    JsonKind::kBool,   JsonKind::kBool};
  size_t i = 0;
  for (const JsonValue& value : a.elements()) CHECK(value.kind() == kinds[i++]);
  CHECK(root.at("b").at("c").is_object());
  CHECK_EQ(root.at("d").size(), size_t{0});
  CHECK(root.get("missing").is_null());
  CHECK(!root.has("missing"));
  CHECK_EQ(root.get_int("missing", 7), int64_t{7});
}

TEST(json_members_keep_the_order_of_the_file) {
  const JsonDocument document = parse(R"({"z": [1, {"y": 2}], "a": {"b": 3}, "m": 4})");
  std::string keys;
  for (const edgec::JsonMember& member : document.root().members()) keys += std::string(member.key) + ",";
  CHECK_EQ(keys, std::string("z,a,m,"));
}

TEST(json_integers_are_exact_to_the_ends_of_int64) {
  CHECK_EQ(parse("9223372036854775807").root().as_int(), INT64_MAX);
  CHECK_EQ(parse("-9223372036854775808").root().as_int(), INT64_MIN);
  CHECK(parse("9223372036854775808").root().kind() == JsonKind::kDouble);
  CHECK(parse("-9223372036854775809").root().kind() == JsonKind::kDouble);
  CHECK(parse("1.0").root().kind() == JsonKind::kDouble);
  CHECK(parse("1e2").root().kind() == JsonKind::kDouble);
  CHECK_THROWS(parse("[300]").root().elements().begin().operator*().as_int(0, 255), EDGEC_CORRUPT);
}

TEST(json_doubles_round_correctly) {
  CHECK_EQ(number("1e-05"), 1e-05);
  CHECK_EQ(number("0.041666666666666664"), 0.041666666666666664);
  CHECK_EQ(number("1.7976931348623157e308"), 1.7976931348623157e308);
  CHECK_EQ(number("5e-324"), 5e-324);
  CHECK_EQ(number("123456789012345678901234567890"), 123456789012345678901234567890.0);
  CHECK_EQ(number("9007199254740993"), 9007199254740993.0);
  CHECK_EQ(number("0.1e1"), 1.0);
  CHECK_EQ(number("1E+2"), 100.0);
  CHECK_EQ(1.0 / number("-0"), -1.0 / 0.0);
  CHECK_EQ(number("0.000000000000000000000000000000000000000000000000000000000012345"), 1.2345e-59);
}

TEST(json_strings_resolve_escapes_to_utf8) {
  const JsonDocument document = parse(R"(["\"\\\/\b\f\n\r\t", "\u0041\u00e9\uD55C\ud83d\ude00", "Ġ한😀", "a\u0000b"])");
  std::string seen[4];
  size_t i = 0;
  for (const JsonValue& value : document.root().elements()) seen[i++] = std::string(value.as_string());
  CHECK_EQ(seen[0], std::string("\"\\/\b\f\n\r\t"));
  CHECK_EQ(seen[1], std::string("Aé한😀"));
  CHECK_EQ(seen[2], std::string("Ġ한😀"));
  CHECK_EQ(seen[3], std::string("a\0b", 3));
}

TEST(json_refuses_what_is_not_json) {
  const std::string bad[] = {
      "",
      "{",
      "[1,]",
      "{\"a\":1,}",
      "[1 2]",
      "nul",
      "tru",
      "01",
      "-",
      "1.",
      ".5",
      "1e",
      "+1",
      "0x1",
      "NaN",
      "Infinity",
      "1e999",
      "\"a",
      "\"\\x\"",
      "\"\\u12g4\"",
      "\"\\ud800\"",
      "\"\\udc00\"",
      "\"\n\"",
      "\"\xff\"",
      "\"\xc0\x80\"",
      "\"\xed\xa0\x80\"",
      "1 1",
      "[1]]",
      "{1:2}",
      "{\"a\" 1}",
      "'a'",
      "// x\n1",
      "\"\\ud800\\u0041\"",
      std::string("1\0", 2),
  };
  for (const std::string& text : bad) CHECK_THROWS(parse(text), EDGEC_CORRUPT);
}

TEST(json_depth_is_limited) {
  const std::string deep = std::string(JsonDocument::kMaxDepth, '[') + std::string(JsonDocument::kMaxDepth, ']');
  CHECK(parse(deep).root().is_array());
  CHECK_THROWS(parse("[" + deep + "]"), EDGEC_CORRUPT);
  CHECK_THROWS(parse(std::string(1000000, '[')), EDGEC_CORRUPT);
}

TEST(json_errors_name_the_file_and_the_place) {
  const std::string text = R"({"model": {"layers": ["x", {"size": 1.5}]}})";
  CHECK_EQ(message_of(text, [](const JsonValue& root) { root.at("model").at("width"); }),
           std::string("file.json: model has no \"width\""));
  CHECK_EQ(message_of(text,
                      [](const JsonValue& root) {
                        for (const JsonValue& layer : root.at("model").at("layers").elements()) {
                          if (layer.is_object()) layer.at("size").as_int();
                        }
                      }),
           std::string("file.json: model.layers[1].size is not an integer"));
  CHECK_EQ(message_of("[1, 2", [](const JsonValue&) {}),
           std::string("file.json is not valid JSON at byte 5: expected ',' or ']'"));
  CHECK_EQ(message_of(R"({"a": 1, "a": 2})", [](const JsonValue& root) { root.at("a"); }),
           std::string("file.json: the document has the key \"a\" twice"));
}
