#include "tokenizer.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "json.h"
#include "status.h"
#include "unicode.h"

namespace edgec {
namespace {

constexpr int64_t kMaxToken = (int64_t{1} << 22) - 1;  // bounds what a hostile file can make us allocate

// GPT-2's alphabet: a printable character for each byte. 188 bytes stand for themselves, the others are U+0100 …
struct ByteAlphabet {
  uint16_t of_byte[256] = {};
  int16_t of_char[0x180] = {};
  constexpr ByteAlphabet() {
    for (int16_t& byte : of_char) byte = -1;
    uint16_t next = 0x100;
    for (uint16_t b = 0; b < 256; ++b) {
      const bool itself = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      of_byte[b] = itself ? b : next++;
      of_char[of_byte[b]] = static_cast<int16_t>(b);
    }
  }
};
constexpr ByteAlphabet kAlphabet;

// The bytes that `token` is written for; false, and nothing, when it has a character outside the alphabet.
bool append_bytes(std::string_view token, std::vector<char>* out) {
  const size_t before = out->size();
  for (size_t i = 0; i < token.size();) {
    uint32_t c = 0;
    const int bytes = decode_utf8(token.data() + i, token.size() - i, &c);
    if (bytes == 0 || c >= 0x180 || kAlphabet.of_char[c] < 0) {
      out->resize(before);
      return false;
    }
    out->push_back(static_cast<char>(kAlphabet.of_char[c]));
    i += static_cast<size_t>(bytes);
  }
  return true;
}

std::string read_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    const int error = errno;
    throw Error(error == ENOENT || error == ENOTDIR ? EDGEC_NOT_FOUND : EDGEC_IO,
                "can't open " + path + ": " + std::strerror(error));
  }
  std::string text;
  char buffer[1 << 16];
  size_t got;
  while ((got = std::fread(buffer, 1, sizeof(buffer), file)) > 0 && text.size() <= JsonDocument::kMaxBytes) {
    text.append(buffer, got);
  }
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed) throw Error(EDGEC_IO, "can't read " + path);
  return text;
}

[[noreturn]] void unsupported(const std::string& what) { throw Error(EDGEC_UNSUPPORTED, "the tokenizer " + what); }
[[noreturn]] void corrupt(const std::string& what) { throw Error(EDGEC_CORRUPT, "the tokenizer " + what); }

std::string quoted(std::string_view token) { return "\"" + std::string(token.substr(0, 100)) + "\""; }

void check_around_the_model(const JsonValue& root) {
  if (const JsonValue normalizer = root.get("normalizer"); !normalizer.is_null()) {
    const std::string type(normalizer.at("type").as_string());
    if (type != "Sequence" || normalizer.at("normalizers").size() != 0) {
      unsupported("has a normalizer (" + type + "), which isn't supported");
    }
  }
  const JsonValue decoder = root.get("decoder");
  if (decoder.is_null()) unsupported("has no ByteLevel decoder");
  std::string type(decoder.at("type").as_string());
  if (type == "Sequence" && decoder.at("decoders").size() == 1) {
    type = (*decoder.at("decoders").elements().begin()).at("type").as_string();
  }
  if (type != "ByteLevel") unsupported("has the decoder " + type + "; only ByteLevel is supported");
  // Post-processors only add special tokens, which a caller here writes out himself; truncation and padding are
  // settings for batches that callers of `tokenizers` override.
}

struct Model {
  StringTable ids;                       // by token, as written in the file
  std::vector<std::string_view> tokens;  // by id; an empty view without data: there is no such id
  std::vector<Bpe::Merge> merges;
  Bpe::Options options;
};

std::string_view optional_string(const JsonValue& model, const char* key) { return model.get_string(key, ""); }

Model read_model(const JsonValue& value) {
  if (value.get_string("type", "BPE") != "BPE") {
    unsupported("is a " + std::string(value.at("type").as_string()) + "; only byte-level BPE is supported");
  }
  if (value.get_double("dropout", 0.0) != 0.0) unsupported("has dropout, which isn't supported");
  if (value.get_bool("byte_fallback", false)) unsupported("has byte_fallback, which isn't supported");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!optional_string(value, key).empty()) unsupported(std::string("has a ") + key + ", which isn't supported");
  }
  Model model;
  model.options.ignore_merges = value.get_bool("ignore_merges", false);
  model.options.fuse_unknown = value.get_bool("fuse_unk", false);

  const JsonValue vocab = value.at("vocab");
  if (!vocab.is_object()) corrupt("has a vocab that is not an object");
  model.ids = StringTable(vocab.size());
  model.tokens.reserve(vocab.size());
  for (const JsonMember& member : vocab.members()) {
    const auto id = static_cast<size_t>(member.value.as_int(0, kMaxToken));
    if (member.key.empty()) corrupt("has an empty token");
    if (id >= model.tokens.size()) model.tokens.resize(id + 1);
    if (!model.tokens[id].empty()) corrupt("has the id " + std::to_string(id) + " twice");
    model.tokens[id] = member.key;
    if (!model.ids.insert(member.key, static_cast<int32_t>(id))) corrupt("has " + quoted(member.key) + " twice");
  }
  if (model.tokens.empty()) corrupt("has an empty vocabulary");
  const std::string_view unknown = optional_string(value, "unk_token");
  if (!unknown.empty()) {
    model.options.unknown = model.ids.find(unknown);
    if (model.options.unknown < 0) corrupt("has " + quoted(unknown) + " as unk_token, which is not in its vocabulary");
  }

  const JsonValue merges = value.at("merges");
  model.merges.reserve(merges.size());
  std::string joined;
  const auto id_of = [&](std::string_view token) {
    const int32_t id = model.ids.find(token);
    if (id < 0) corrupt("merges " + quoted(token) + ", which is not in its vocabulary");
    return id;
  };
  for (const JsonValue& merge : merges.elements()) {
    std::string_view left, right;
    if (merge.is_string()) {
      const std::string_view line = merge.as_string();
      if (line.substr(0, 8) == "#version") continue;
      const size_t cut = line.find(' ');
      if (cut == std::string_view::npos || line.find(' ', cut + 1) != std::string_view::npos) {
        corrupt("has a merge that is not two tokens: " + quoted(line));
      }
      left = line.substr(0, cut);
      right = line.substr(cut + 1);
    } else {
      if (!merge.is_array() || merge.size() != 2) corrupt("has a merge that is not two tokens");
      auto element = merge.elements().begin();
      left = (*element).as_string();
      right = (*++element).as_string();
    }
    joined.assign(left);
    joined.append(right);
    model.merges.push_back({id_of(left), id_of(right), id_of(joined)});
  }
  return model;
}

std::vector<AddedToken> read_added_tokens(const JsonValue& value, Model* model, std::vector<bool>* special) {
  std::vector<AddedToken> tokens;
  if (value.is_null()) return tokens;
  StringTable contents(value.size());
  for (const JsonValue& item : value.elements()) {
    AddedToken token;
    token.content = std::string(item.at("content").as_string());
    token.id = static_cast<int32_t>(item.at("id").as_int(0, kMaxToken));
    token.single_word = item.get_bool("single_word", false);
    token.lstrip = item.get_bool("lstrip", false);
    token.rstrip = item.get_bool("rstrip", false);
    token.special = item.get_bool("special", false);
    token.normalized = item.get_bool("normalized", !token.special);
    if (token.content.empty()) continue;
    const std::string_view content = item.at("content").as_string();  // in the document, which outlives the table
    if (!contents.insert(content, token.id)) corrupt("adds " + quoted(content) + " twice");
    const auto id = static_cast<size_t>(token.id);
    if (id >= model->tokens.size()) model->tokens.resize(id + 1);
    const int32_t in_model = model->ids.find(content);
    if (in_model >= 0 ? in_model != token.id : !model->tokens[id].empty()) {
      corrupt("adds " + quoted(content) + " with the id of another token");
    }
    model->tokens[id] = content;
    if (special->size() <= id) special->resize(id + 1);
    if (token.special) (*special)[id] = true;
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace

Tokenizer Tokenizer::from_file(const std::string& path) { return from_json(read_file(path), path); }

Tokenizer Tokenizer::from_json(std::string text, std::string name) {
  const JsonDocument document = JsonDocument::parse(std::move(text), std::move(name));
  const JsonValue root = document.root();
  Tokenizer result;
  check_around_the_model(root);
  result.pretokenizer_ = PreTokenizer::from_json(root.get("pre_tokenizer"));
  Model model = read_model(root.at("model"));
  const size_t in_model = model.tokens.size();
  result.added_ = AddedTokens(read_added_tokens(root.get("added_tokens"), &model, &result.special_));
  result.special_.resize(model.tokens.size());

  // A token is the bytes it is written for; one with other characters is what it says, and no merge can reach it.
  std::vector<bool> from_bytes(model.tokens.size());
  size_t total = 0;
  for (const std::string_view token : model.tokens) total += token.size();
  result.bytes_.reserve(total);
  result.offsets_.reserve(model.tokens.size() + 1);
  result.offsets_.push_back(0);
  for (size_t id = 0; id < model.tokens.size(); ++id) {
    const std::string_view token = model.tokens[id];
    from_bytes[id] = append_bytes(token, &result.bytes_) && !token.empty();
    if (!from_bytes[id]) result.bytes_.insert(result.bytes_.end(), token.begin(), token.end());
    result.offsets_.push_back(static_cast<uint32_t>(result.bytes_.size()));
  }

  std::array<int32_t, 256> byte_tokens;
  std::string character;
  for (size_t b = 0; b < 256; ++b) {
    character.clear();
    append_utf8(kAlphabet.of_byte[b], &character);
    byte_tokens[b] = model.ids.find(character);
  }
  std::vector<Bpe::Word> words;
  words.reserve(in_model);
  for (size_t id = 0; id < in_model; ++id) {
    const auto token = static_cast<int32_t>(id);
    if (from_bytes[id] && model.ids.find(model.tokens[id]) == token)
      words.push_back({result.token_bytes(token), token});
  }
  result.bpe_ = Bpe(words, model.merges, byte_tokens, model.options);
  return result;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool special) const {
  if (text.size() > JsonDocument::kMaxBytes) throw Error(EDGEC_INVALID_ARGUMENT, "the text is too large to tokenize");
  if (const size_t invalid = find_invalid_utf8(text); invalid != std::string_view::npos) {
    throw Error(EDGEC_INVALID_ARGUMENT, "the text is not UTF-8 at byte " + std::to_string(invalid));
  }
  std::vector<int32_t> tokens;
  tokens.reserve(text.size() / 4 + 4);
  std::vector<TextPiece> pieces;
  Words words;
  Bpe::Scratch scratch;
  added_.split(text, special, &pieces);
  for (const TextPiece& piece : pieces) {
    if (piece.id >= 0) {
      tokens.push_back(piece.id);
      continue;
    }
    pretokenizer_.split(piece.text, &words);
    for (const std::string_view word : words.words) bpe_.encode(word, &scratch, &tokens);
  }
  return tokens;
}

std::string Tokenizer::decode(const int32_t* tokens, size_t count, bool skip_special) const {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) {
    if (skip_special && is_special(tokens[i])) continue;
    bytes += token_bytes(tokens[i]);
  }
  return bytes;
}

std::string_view Tokenizer::token_bytes(int32_t token) const {
  if (token < 0 || token >= vocab_size()) return {};
  const auto id = static_cast<size_t>(token);
  return {bytes_.data() + offsets_[id], offsets_[id + 1] - offsets_[id]};
}

bool Tokenizer::is_special(int32_t token) const {
  return token >= 0 && token < vocab_size() && special_[static_cast<size_t>(token)];
}

}  // namespace edgec
