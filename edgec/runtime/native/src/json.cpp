#include "json.h"

#include <clocale>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "status.h"
#include "unicode.h"

namespace edgec {
namespace {

constexpr double kPowersOfTen[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                   1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// strtod, whatever decimal point the app's locale has.
double slow_double(std::string digits) {
  const size_t point = digits.find('.');
  if (point != std::string::npos) {
    const lconv* conventions = localeconv();
    if (conventions != nullptr && conventions->decimal_point != nullptr && conventions->decimal_point[0] != '\0') {
      digits.replace(point, 1, conventions->decimal_point);
    }
  }
  return std::strtod(digits.c_str(), nullptr);
}

}  // namespace

// Recursive descent over the text; a string is resolved in place, since its UTF-8 is never longer than its escapes.
class JsonParser {
 public:
  explicit JsonParser(JsonDocument* document) : document_(*document), text_(&document->text_[0]) {}

  void run() {
    end_ = document_.text_.size();
    document_.nodes_.reserve(end_ / 16 + 2);
    document_.nodes_.push_back(node(JsonKind::kNull));
    space();
    value(0);
    space();
    if (at_ != end_) bad("something follows the value");
  }

 private:
  using Node = JsonDocument::Node;

  [[noreturn]] void bad(const char* what) const {
    throw Error(EDGEC_CORRUPT, document_.name_ + " is not valid JSON at byte " + std::to_string(at_) + ": " + what);
  }

  Node node(JsonKind kind) const {
    Node result;
    result.kind = kind;
    result.next = static_cast<uint32_t>(document_.nodes_.size()) + 1;
    result.integer = 0;
    return result;
  }

  void space() {
    while (at_ < end_ && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
  }

  char peek() const { return at_ < end_ ? text_[at_] : '\0'; }

  void word(const char* expected) {
    const size_t bytes = std::strlen(expected);
    if (end_ - at_ < bytes || std::memcmp(text_ + at_, expected, bytes) != 0) bad("not a value");
    at_ += bytes;
  }

  void value(int depth) {
    switch (peek()) {
      case '{':
        return container(JsonKind::kObject, '}', depth);
      case '[':
        return container(JsonKind::kArray, ']', depth);
      case '"':
        return string();
      case 't': {
        word("true");
        Node result = node(JsonKind::kBool);
        result.integer = 1;
        document_.nodes_.push_back(result);
        return;
      }
      case 'f':
        word("false");
        document_.nodes_.push_back(node(JsonKind::kBool));
        return;
      case 'n':
        word("null");
        document_.nodes_.push_back(node(JsonKind::kNull));
        return;
      default:
        return number();
    }
  }

  void container(JsonKind kind, char close, int depth) {
    if (depth >= JsonDocument::kMaxDepth) bad("nested too deeply");
    const size_t self = document_.nodes_.size();
    document_.nodes_.push_back(node(kind));
    int64_t count = 0;
    ++at_;
    space();
    if (peek() == close) {
      ++at_;
    } else {
      for (;;) {
        if (kind == JsonKind::kObject) {
          if (peek() != '"') bad("expected a key");
          string();
          space();
          if (peek() != ':') bad("expected ':'");
          ++at_;
          space();
        }
        value(depth + 1);
        ++count;
        space();
        const char c = peek();
        if (c != ',' && c != close) bad(kind == JsonKind::kObject ? "expected ',' or '}'" : "expected ',' or ']'");
        ++at_;
        if (c == close) break;
        space();
      }
    }
    document_.nodes_[self].integer = count;
    document_.nodes_[self].next = static_cast<uint32_t>(document_.nodes_.size());
  }

  uint32_t hex4() {
    if (end_ - at_ < 4) bad("an escape is cut short");
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = text_[at_];
      uint32_t digit;
      if (is_digit(c)) {
        digit = static_cast<uint32_t>(c - '0');
      } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
        digit = static_cast<uint32_t>((c | 0x20) - 'a' + 10);
      } else {
        bad("expected a hexadecimal digit");
      }
      value = value << 4 | digit;
      ++at_;
    }
    return value;
  }

  // After "\u". Writes at most four bytes at `out`, which were read already.
  size_t unicode_escape(char* out) {
    uint32_t c = hex4();
    if (c >= 0xDC00 && c < 0xE000) bad("a low surrogate without a high one");
    if (c >= 0xD800 && c < 0xDC00) {
      if (end_ - at_ < 2 || text_[at_] != '\\' || text_[at_ + 1] != 'u') bad("a high surrogate without a low one");
      at_ += 2;
      const uint32_t low = hex4();
      if (low < 0xDC00 || low >= 0xE000) bad("a high surrogate without a low one");
      c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
    scratch_.clear();
    append_utf8(c, &scratch_);
    std::memcpy(out, scratch_.data(), scratch_.size());
    return scratch_.size();
  }

  void string() {
    ++at_;
    const size_t start = at_;
    size_t out = at_;
    for (;;) {
      if (at_ >= end_) bad("a string has no end");
      const auto c = static_cast<uint8_t>(text_[at_]);
      if (c == '"') break;
      if (c < 0x20) bad("a control character in a string");
      if (c == '\\') {
        if (++at_ >= end_) bad("a string has no end");
        const char escape = text_[at_++];
        char plain = 0;
        switch (escape) {
          case '"':
          case '\\':
          case '/':
            plain = escape;
            break;
          case 'b':
            plain = '\b';
            break;
          case 'f':
            plain = '\f';
            break;
          case 'n':
            plain = '\n';
            break;
          case 'r':
            plain = '\r';
            break;
          case 't':
            plain = '\t';
            break;
          case 'u':
            out += unicode_escape(text_ + out);
            continue;
          default:
            bad("an unknown escape");
        }
        text_[out++] = plain;
      } else if (c < 0x80) {
        text_[out++] = text_[at_++];
      } else {
        uint32_t code_point;
        const int bytes = decode_utf8(text_ + at_, end_ - at_, &code_point);
        if (bytes == 0) bad("not UTF-8");
        for (int i = 0; i < bytes; ++i) text_[out++] = text_[at_++];
      }
    }
    ++at_;
    Node result = node(JsonKind::kString);
    result.string = {static_cast<uint32_t>(start), static_cast<uint32_t>(out - start)};
    document_.nodes_.push_back(result);
  }

  void number() {
    const size_t start = at_;
    const bool negative = peek() == '-';
    if (negative) ++at_;
    if (!is_digit(peek())) bad("not a value");
    const size_t digits_start = at_;
    uint64_t mantissa = 0;
    int digits = 0, scale = 0;  // the value is mantissa · 10^scale while digits ≤ 19
    const auto digit = [&] {
      mantissa = digits < 19 ? mantissa * 10 + static_cast<uint64_t>(text_[at_] - '0') : mantissa;
      if (mantissa > 0 || digits > 0) ++digits;
      ++at_;
    };
    while (is_digit(peek())) digit();
    if (at_ - digits_start > 1 && text_[digits_start] == '0') bad("a number with a leading zero");
    bool whole = true;
    if (peek() == '.') {
      whole = false;
      ++at_;
      if (!is_digit(peek())) bad("a number ends in its point");
      while (is_digit(peek())) {
        digit();
        if (scale > -100000) --scale;
      }
    }
    if (peek() == 'e' || peek() == 'E') {
      whole = false;
      ++at_;
      const bool minus = peek() == '-';
      if (minus || peek() == '+') ++at_;
      if (!is_digit(peek())) bad("a number ends in its exponent");
      int exponent = 0;
      while (is_digit(peek())) {
        if (exponent < 100000) exponent = exponent * 10 + (text_[at_] - '0');
        ++at_;
      }
      scale += minus ? -exponent : exponent;
    }
    // "-0" is a double: int64 would lose its sign.
    if (whole && digits <= 19 && mantissa <= uint64_t{INT64_MAX} + (negative ? 1 : 0) && !(negative && mantissa == 0)) {
      Node result = node(JsonKind::kInteger);
      result.integer = static_cast<int64_t>(negative ? ~mantissa + 1 : mantissa);
      document_.nodes_.push_back(result);
      return;
    }
    Node result = node(JsonKind::kDouble);
    if (digits <= 19 && mantissa <= uint64_t{1} << 53 && scale >= -22 && scale <= 22) {
      // Both factors are exact, so one operation rounds correctly (Clinger, 1990).
      const auto m = static_cast<double>(mantissa);
      result.number = scale < 0 ? m / kPowersOfTen[-scale] : m * kPowersOfTen[scale];
      if (negative) result.number = -result.number;
    } else {
      result.number = slow_double(std::string(text_ + start, at_ - start));
    }
    if (!std::isfinite(result.number)) bad("a number out of range");
    document_.nodes_.push_back(result);
  }

  JsonDocument& document_;
  char* text_;
  size_t at_ = 0, end_ = 0;
  std::string scratch_;
};

JsonDocument JsonDocument::parse(std::string text, std::string name) {
  if (text.size() > kMaxBytes) throw Error(EDGEC_CORRUPT, name + " is too large for a JSON file");
  JsonDocument document;
  document.text_ = std::move(text);
  document.name_ = std::move(name);
  JsonParser(&document).run();
  return document;
}

JsonKind JsonValue::kind() const { return document_->nodes_[node_].kind; }

void JsonValue::fail(const char* what) const {
  throw Error(EDGEC_CORRUPT, document_->name_ + ": " + (node_ == 1 ? "the document" : path()) + " " + what);
}

void JsonValue::want(JsonKind wanted, const char* what) const {
  if (kind() != wanted) fail(what);
}

bool JsonValue::as_bool() const {
  want(JsonKind::kBool, "is not true or false");
  return document_->nodes_[node_].integer != 0;
}

int64_t JsonValue::as_int() const {
  want(JsonKind::kInteger, "is not an integer");
  return document_->nodes_[node_].integer;
}

int64_t JsonValue::as_int(int64_t least, int64_t most) const {
  const int64_t value = as_int();
  if (value < least || value > most) {
    fail(("is " + std::to_string(value) + ", outside " + std::to_string(least) + " … " + std::to_string(most)).c_str());
  }
  return value;
}

double JsonValue::as_double() const {
  if (!is_number()) fail("is not a number");
  const JsonDocument::Node& node = document_->nodes_[node_];
  return node.kind == JsonKind::kInteger ? static_cast<double>(node.integer) : node.number;
}

std::string_view JsonValue::as_string() const {
  want(JsonKind::kString, "is not a string");
  return document_->view(document_->nodes_[node_]);
}

size_t JsonValue::size() const {
  if (!is_array() && !is_object()) fail("is neither an array nor an object");
  return static_cast<size_t>(document_->nodes_[node_].integer);
}

uint32_t JsonValue::find(std::string_view key) const {
  want(JsonKind::kObject, "is not an object");
  uint32_t found = 0;
  for (const JsonMember& member : members()) {
    if (member.key != key) continue;
    if (found != 0) fail(("has the key \"" + std::string(key) + "\" twice").c_str());
    found = member.value.node_;
  }
  return found;
}

JsonValue JsonValue::at(std::string_view key) const {
  const uint32_t found = find(key);
  if (found == 0) fail(("has no \"" + std::string(key) + "\"").c_str());
  return JsonValue(document_, found);
}

bool JsonValue::has(std::string_view key) const { return find(key) != 0; }

JsonValue JsonValue::get(std::string_view key) const { return JsonValue(document_, find(key)); }

bool JsonValue::get_bool(std::string_view key, bool otherwise) const {
  const JsonValue value = get(key);
  return value.is_null() ? otherwise : value.as_bool();
}

int64_t JsonValue::get_int(std::string_view key, int64_t otherwise) const {
  const JsonValue value = get(key);
  return value.is_null() ? otherwise : value.as_int();
}

double JsonValue::get_double(std::string_view key, double otherwise) const {
  const JsonValue value = get(key);
  return value.is_null() ? otherwise : value.as_double();
}

std::string_view JsonValue::get_string(std::string_view key, std::string_view otherwise) const {
  const JsonValue value = get(key);
  return value.is_null() ? otherwise : value.as_string();
}

JsonValue::Elements JsonValue::elements() const {
  want(JsonKind::kArray, "is not an array");
  return {document_, node_ + 1, document_->nodes_[node_].next};
}

JsonValue::Members JsonValue::members() const {
  want(JsonKind::kObject, "is not an object");
  return {document_, node_ + 1, document_->nodes_[node_].next};
}

JsonValue::Elements::Iterator& JsonValue::Elements::Iterator::operator++() {
  node_ = document_->nodes_[node_].next;
  return *this;
}

JsonMember JsonValue::Members::Iterator::operator*() const {
  return {document_->view(document_->nodes_[node_]), JsonValue(document_, node_ + 1)};
}

JsonValue::Members::Iterator& JsonValue::Members::Iterator::operator++() {
  node_ = document_->nodes_[node_ + 1].next;
  return *this;
}

std::string JsonValue::path() const {
  std::string result;
  uint32_t at = 1;
  while (at != node_) {
    const JsonDocument::Node& parent = document_->nodes_[at];
    if (parent.kind != JsonKind::kArray && parent.kind != JsonKind::kObject) return "a missing value";
    const bool object = parent.kind == JsonKind::kObject;
    uint32_t child = at + 1;
    bool found = false;
    for (size_t i = 0; !found && child < parent.next; ++i) {
      const uint32_t value = object ? child + 1 : child;
      if (node_ < document_->nodes_[value].next) {
        if (object) {
          result += (result.empty() ? "" : ".") + std::string(document_->view(document_->nodes_[child]));
        } else {
          result += "[" + std::to_string(i) + "]";
        }
        at = value;
        found = true;
      }
      child = document_->nodes_[value].next;
    }
    if (!found) return "a missing value";
  }
  return result;
}

}  // namespace edgec
