// A small strict JSON reader for files from outside: manifests, safetensors headers, tokenizer.json.
//
// RFC 8259, and no more: no comments, no trailing commas, no NaN. Text must be valid UTF-8; \u escapes become UTF-8,
// and a lone surrogate is refused. Depth and size are limited, so a hostile file costs at most a small multiple of its
// bytes.
//
//   JsonDocument document = JsonDocument::parse(text, "manifest.json");      // throws Error(EDGEC_CORRUPT, …)
//   int64_t layers = document.root().at("layers").as_int();
//   for (JsonMember member : document.root().at("vocab").members()) …        // in the file's order
#ifndef EDGEC_JSON_H_
#define EDGEC_JSON_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace edgec {

enum class JsonKind : uint8_t { kNull, kBool, kInteger, kDouble, kString, kArray, kObject };

class JsonDocument;
struct JsonMember;

// A handle to a value; valid while its document lives (and isn't moved). Accessors of the wrong kind throw
// Error(EDGEC_CORRUPT) that names the file and the value's place ("manifest.json: model.layers is not an integer").
class JsonValue {
 public:
  JsonKind kind() const;
  bool is_null() const { return kind() == JsonKind::kNull; }
  bool is_bool() const { return kind() == JsonKind::kBool; }
  bool is_int() const { return kind() == JsonKind::kInteger; }
  bool is_number() const { return kind() == JsonKind::kInteger || kind() == JsonKind::kDouble; }
  bool is_string() const { return kind() == JsonKind::kString; }
  bool is_array() const { return kind() == JsonKind::kArray; }
  bool is_object() const { return kind() == JsonKind::kObject; }

  bool as_bool() const;
  int64_t as_int() const;                             // written without fraction or exponent, and fits an int64
  int64_t as_int(int64_t least, int64_t most) const;  // also refuses values outside [least, most]
  double as_double() const;                           // integers too
  std::string_view as_string() const;                 // UTF-8, escapes resolved; may hold NUL

  size_t size() const;  // of an array or object: its elements or members

  // Object members. A key that stands twice in one object is refused when it is looked up.
  JsonValue at(std::string_view key) const;  // throws when missing
  bool has(std::string_view key) const;
  JsonValue get(std::string_view key) const;                  // the JSON null when missing
  bool get_bool(std::string_view key, bool otherwise) const;  // `otherwise` when missing or null
  int64_t get_int(std::string_view key, int64_t otherwise) const;
  double get_double(std::string_view key, double otherwise) const;
  std::string_view get_string(std::string_view key, std::string_view otherwise) const;

  // Elements of an array, members of an object; both are forward ranges: `for (JsonValue v : value.elements())`.
  class Elements;
  class Members;
  Elements elements() const;
  Members members() const;

  std::string path() const;  // "model.vocab", "shape[2]"; found by walking the document, for messages only

 private:
  friend class JsonDocument;
  JsonValue(const JsonDocument* document, uint32_t node) : document_(document), node_(node) {}
  [[noreturn]] void fail(const char* what) const;
  void want(JsonKind kind, const char* what) const;
  uint32_t find(std::string_view key) const;  // 0 when missing

  const JsonDocument* document_;
  uint32_t node_;
};

struct JsonMember {
  std::string_view key;
  JsonValue value;
};

class JsonDocument {
 public:
  static constexpr int kMaxDepth = 64;
  static constexpr size_t kMaxBytes = size_t{256} << 20;

  // `name` stands in messages. Takes the text, because strings are resolved in place.
  static JsonDocument parse(std::string text, std::string name);

  JsonDocument(JsonDocument&&) = default;
  JsonDocument(const JsonDocument&) = delete;

  JsonValue root() const { return JsonValue(this, 1); }
  const std::string& name() const { return name_; }

 private:
  friend class JsonValue;
  friend class JsonParser;

  // Values in the order of the text. A container is followed by its children; `next` is the node after its last one.
  // An object's children are key, value, key, value, …
  struct Span {
    uint32_t offset, bytes;  // in text_
  };
  struct Node {
    JsonKind kind;
    uint32_t next;
    union {
      int64_t integer;  // also a bool's 0 or 1, and how many elements or members a container has
      double number;
      Span string;
    };
  };
  JsonDocument() = default;
  std::string_view view(const Node& node) const { return {text_.data() + node.string.offset, node.string.bytes}; }

  std::string text_;
  std::string name_;
  std::vector<Node> nodes_;  // nodes_[0] is the null that get() returns for what is missing
};

class JsonValue::Elements {
 public:
  class Iterator {
   public:
    Iterator(const JsonDocument* document, uint32_t node) : document_(document), node_(node) {}
    JsonValue operator*() const { return JsonValue(document_, node_); }
    Iterator& operator++();
    bool operator!=(const Iterator& other) const { return node_ != other.node_; }

   private:
    const JsonDocument* document_;
    uint32_t node_;
  };
  Iterator begin() const { return {document_, first_}; }
  Iterator end() const { return {document_, last_}; }

 private:
  friend class JsonValue;
  Elements(const JsonDocument* document, uint32_t first, uint32_t last)
      : document_(document), first_(first), last_(last) {}
  const JsonDocument* document_;
  uint32_t first_, last_;
};

class JsonValue::Members {
 public:
  class Iterator {
   public:
    Iterator(const JsonDocument* document, uint32_t node) : document_(document), node_(node) {}
    JsonMember operator*() const;
    Iterator& operator++();
    bool operator!=(const Iterator& other) const { return node_ != other.node_; }

   private:
    const JsonDocument* document_;
    uint32_t node_;
  };
  Iterator begin() const { return {document_, first_}; }
  Iterator end() const { return {document_, last_}; }

 private:
  friend class JsonValue;
  Members(const JsonDocument* document, uint32_t first, uint32_t last)
      : document_(document), first_(first), last_(last) {}
  const JsonDocument* document_;
  uint32_t first_, last_;
};

}  // namespace edgec

#endif  // EDGEC_JSON_H_
