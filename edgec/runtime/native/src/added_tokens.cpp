#include "added_tokens.h"

#include <algorithm>

#include "unicode.h"

namespace edgec {
namespace {

// Where the character before `at` begins; `at` > 0, and the text is valid UTF-8.
size_t before(std::string_view text, size_t at) {
  do --at;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80);
  return at;
}

uint8_t class_at(std::string_view text, size_t at, size_t* bytes) {
  uint32_t c = 0;
  *bytes = static_cast<size_t>(decode_utf8(text.data() + at, text.size() - at, &c));
  return char_class(c);
}

bool ends_with_word(std::string_view text) {
  size_t bytes;
  return !text.empty() && (class_at(text, before(text, text.size()), &bytes) & kWord) != 0;
}

bool starts_with_word(std::string_view text) {
  size_t bytes;
  return !text.empty() && (class_at(text, 0, &bytes) & kWord) != 0;
}

// The start of the white space that ends at `end`, not before `least`.
size_t space_before(std::string_view text, size_t end, size_t least) {
  while (end > least) {
    const size_t at = before(text, end);
    size_t bytes;
    if ((class_at(text, at, &bytes) & kWhiteSpace) == 0) break;
    end = at;
  }
  return end;
}

size_t space_after(std::string_view text, size_t start) {
  while (start < text.size()) {
    size_t bytes;
    if ((class_at(text, start, &bytes) & kWhiteSpace) == 0) break;
    start += bytes;
  }
  return start;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  raw_.build(tokens_, false);
  normalized_.build(tokens_, true);
}

void AddedTokens::Trie::build(const std::vector<AddedToken>& tokens, bool normalized) {
  struct Entry {
    std::string_view content;
    int32_t token;
  };
  std::vector<Entry> entries;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i].normalized == normalized) entries.push_back({tokens[i].content, static_cast<int32_t>(i)});
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.content < b.content; });

  // Breadth first over ranges of equal prefixes, so that a node's edges lie side by side.
  struct Range {
    size_t first, last, depth;
  };
  std::vector<Range> ranges{{0, entries.size(), 0}};
  nodes.assign(1, Node{});
  for (size_t i = 0; i < ranges.size(); ++i) {
    auto [first, last, depth] = ranges[i];
    if (first < last && entries[first].content.size() == depth) nodes[i].token = entries[first++].token;
    nodes[i].first = static_cast<uint32_t>(edges.size());
    while (first < last) {
      const char byte = entries[first].content[depth];
      size_t end = first;
      while (end < last && entries[end].content[depth] == byte) ++end;
      edges.push_back({static_cast<uint8_t>(byte), static_cast<uint32_t>(nodes.size())});
      nodes.push_back({});
      ranges.push_back({first, end, depth + 1});
      first = end;
    }
    nodes[i].last = static_cast<uint32_t>(edges.size());
  }
  for (const Entry& entry : entries) starts[static_cast<uint8_t>(entry.content[0])] = true;
}

int32_t AddedTokens::Trie::match(std::string_view text) const {
  int32_t longest = -1;
  uint32_t at = 0;
  for (const char c : text) {
    const Node& node = nodes[at];
    const auto begin = edges.begin() + node.first, end = edges.begin() + node.last;
    const auto edge = std::lower_bound(begin, end, static_cast<uint8_t>(c),
                                       [](const Edge& e, uint8_t byte) { return e.byte < byte; });
    if (edge == end || edge->byte != static_cast<uint8_t>(c)) break;
    at = edge->node;
    if (nodes[at].token >= 0) longest = nodes[at].token;
  }
  return longest;
}

void AddedTokens::scan(const Trie& trie, std::string_view text, bool special, std::vector<TextPiece>* pieces) const {
  size_t done = 0;  // text up to here is in a piece
  size_t at = 0;
  while (at < text.size()) {
    if (!trie.starts[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    const int32_t index = trie.match(text.substr(at));
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t start = at, stop = at + token.content.size();
    at = stop;  // matches don't overlap, also when one is passed over
    if (token.special && !special) continue;
    if (token.single_word && (ends_with_word(text.substr(0, start)) || starts_with_word(text.substr(stop)))) continue;
    if (token.lstrip) start = std::max(space_before(text, start, std::min(done, start)), done);
    if (token.rstrip) stop = space_after(text, stop);
    if (done < start) pieces->push_back({text.substr(done, start - done), -1});
    pieces->push_back({text.substr(start, stop - std::min(start, stop)), token.id});
    done = stop;
  }
  if (done < text.size()) pieces->push_back({text.substr(done), -1});
}

void AddedTokens::split(std::string_view text, bool special, std::vector<TextPiece>* pieces) const {
  pieces->clear();
  if (text.empty()) return;
  if (tokens_.empty()) {
    pieces->push_back({text, -1});
    return;
  }
  if (normalized_.edges.empty()) {
    scan(raw_, text, special, pieces);
    return;
  }
  std::vector<TextPiece> first;
  scan(raw_, text, special, &first);
  for (const TextPiece& piece : first) {
    if (piece.id >= 0) {
      pieces->push_back(piece);
    } else {
      scan(normalized_, piece.text, special, pieces);
    }
  }
}

}  // namespace edgec
