// Tokens that are found in the text before it is split and merged: special tokens, and what was added after training.
//
// As Hugging Face does it: one scan for the tokens that match the text as it is, a second one over what is left for
// those that match normalised text; each is leftmost, then longest.
#ifndef EDGEC_ADDED_TOKENS_H_
#define EDGEC_ADDED_TOKENS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace edgec {

struct AddedToken {
  std::string content;  // not empty
  int32_t id = 0;
  bool single_word = false;  // not beside a word character
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and after it
  bool normalized = false;
  bool special = false;
};

// A stretch of text, or an added token (`id` ≥ 0) in its place.
struct TextPiece {
  std::string_view text;
  int32_t id;
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // Cut `text` (valid UTF-8) into pieces. `special`: false leaves special tokens in the text.
  void split(std::string_view text, bool special, std::vector<TextPiece>* pieces) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // A trie over the bytes of the tokens' contents; the children of a node are a sorted range of edges.
  struct Trie {
    struct Node {
      uint32_t first = 0, last = 0;  // in edges
      int32_t token = -1;            // index of the token that ends here
    };
    struct Edge {
      uint8_t byte;
      uint32_t node;
    };
    std::vector<Node> nodes;
    std::vector<Edge> edges;
    bool starts[256] = {};

    void build(const std::vector<AddedToken>& tokens, bool normalized);
    // The longest token at the start of `text`, or −1.
    int32_t match(std::string_view text) const;
  };

  void scan(const Trie& trie, std::string_view text, bool special, std::vector<TextPiece>* pieces) const;

  std::vector<AddedToken> tokens_;
  Trie raw_, normalized_;
};

}  // namespace edgec

#endif  // EDGEC_ADDED_TOKENS_H_
