#include "stop_strings.h"

namespace edgec {

StopStrings::StopStrings(const std::vector<std::string>& strings) : nodes_(1) {
  for (const std::string& string : strings) {
    int32_t at = 0;
    for (const char c : string) {
      int32_t next = child(at, static_cast<uint8_t>(c));
      if (next < 0) {
        next = static_cast<int32_t>(nodes_.size());
        Node node;
        node.depth = nodes_[static_cast<size_t>(at)].depth + 1;
        nodes_.push_back(std::move(node));
        nodes_[static_cast<size_t>(at)].next.emplace_back(static_cast<uint8_t>(c), next);
      }
      at = next;
    }
    if (at != 0) nodes_[static_cast<size_t>(at)].match = nodes_[static_cast<size_t>(at)].depth;
  }
  // Breadth first: a node's suffix links are made from those of shorter ones.
  std::vector<int32_t> order{0};
  for (size_t i = 0; i < order.size(); ++i) {
    const int32_t parent = order[i];
    for (const auto& [byte, node] : nodes_[static_cast<size_t>(parent)].next) {
      order.push_back(node);
      if (parent == 0) continue;
      int32_t fail = nodes_[static_cast<size_t>(parent)].fail;
      while (fail != 0 && child(fail, byte) < 0) fail = nodes_[static_cast<size_t>(fail)].fail;
      const int32_t next = child(fail, byte);
      Node& self = nodes_[static_cast<size_t>(node)];
      self.fail = next < 0 ? 0 : next;
      if (self.match == 0) self.match = nodes_[static_cast<size_t>(self.fail)].match;
    }
  }
}

int32_t StopStrings::child(int32_t node, uint8_t byte) const {
  for (const auto& [label, next] : nodes_[static_cast<size_t>(node)].next) {
    if (label == byte) return next;
  }
  return -1;
}

bool StopMatcher::push(std::string_view text, std::string* out) {
  if (stopped_) return true;
  if (strings_ == nullptr || strings_->empty()) {
    out->append(text);
    return false;
  }
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    held_.push_back(c);
    int32_t next = strings_->child(state_, byte);
    while (next < 0 && state_ != 0) {
      state_ = strings_->nodes_[static_cast<size_t>(state_)].fail;
      next = strings_->child(state_, byte);
    }
    state_ = next < 0 ? 0 : next;
    const StopStrings::Node& node = strings_->nodes_[static_cast<size_t>(state_)];
    const size_t kept = static_cast<size_t>(node.match > 0 ? node.match : node.depth);
    out->append(held_, 0, held_.size() - kept);
    held_.erase(0, held_.size() - kept);
    if (node.match > 0) {
      held_.clear();
      stopped_ = true;
      return true;
    }
  }
  return false;
}

void StopMatcher::flush(std::string* out) {
  if (!stopped_) out->append(held_);
  held_.clear();
  state_ = 0;
}

}  // namespace edgec
