// Stop strings in a stream of text: what may still become one is held back, nothing from a stop string on is let out.
//
// The stop string that is complete first wins, however the text was cut into pieces; of two that end at the same byte
// the longer. An Aho–Corasick automaton: a byte costs O(1), whatever the strings.
#ifndef EDGEC_STOP_STRINGS_H_
#define EDGEC_STOP_STRINGS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace edgec {

// The strings of a request, compiled; shared by its sequences.
class StopStrings {
 public:
  // Each string: 1 to 256 bytes of UTF-8 (`validate` of sampling_params.h refuses others).
  explicit StopStrings(const std::vector<std::string>& strings);
  bool empty() const { return nodes_.size() == 1; }

 private:
  friend class StopMatcher;
  struct Node {
    std::vector<std::pair<uint8_t, int32_t>> next;  // few children: a scan
    int32_t fail = 0;                               // the longest proper suffix that begins a stop string
    int32_t depth = 0;                              // bytes from the root
    int32_t match = 0;                              // bytes of the longest stop string that ends here; 0: none
  };
  int32_t child(int32_t node, uint8_t byte) const;  // −1 when there is none
  std::vector<Node> nodes_;
};

// One sequence's place in the text.
class StopMatcher {
 public:
  explicit StopMatcher(std::shared_ptr<const StopStrings> strings) : strings_(std::move(strings)) {}

  // Take the next piece and append to `out` what is certain not to belong to a stop string. True when a stop string is
  // complete: everything before it is out, and nothing more will come. `text` is whole characters.
  bool push(std::string_view text, std::string* out);

  // The text has ended: what was held back is text after all.
  void flush(std::string* out);

  bool stopped() const { return stopped_; }

 private:
  std::shared_ptr<const StopStrings> strings_;
  std::string held_;  // always strings_->nodes_[state_].depth bytes
  int32_t state_ = 0;
  bool stopped_ = false;
};

}  // namespace edgec

#endif  // EDGEC_STOP_STRINGS_H_
