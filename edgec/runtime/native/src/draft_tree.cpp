#include "draft_tree.h"

#include <algorithm>
#include <functional>

namespace edgec {

void DraftTree::clear() { nodes_.clear(); }

void DraftTree::add(int32_t parent, int32_t token, float chance, double likely, size_t state) {
  const Node* above = parent < 0 ? nullptr : &nodes_[static_cast<size_t>(parent)];
  const int32_t depth = above == nullptr ? 0 : above->depth + 1;
  nodes_.push_back({token, parent, depth, chance, above == nullptr ? likely : above->reach * likely, state, false});
}

std::vector<int32_t> DraftTree::frontier(size_t count, size_t most) const {
  std::vector<int32_t> found;
  double least = 0;
  if (most < nodes_.size()) {
    std::vector<double> reach;
    for (const Node& node : nodes_) reach.push_back(node.reach);
    const auto last = reach.begin() + static_cast<std::ptrdiff_t>(most);
    std::nth_element(reach.begin(), last, reach.end(), std::greater<double>());
    least = *last;  // of the first that is left out
  }
  for (size_t i = 0; i < nodes_.size(); ++i)
    if (nodes_[i].depth == nodes_.back().depth && nodes_[i].reach > least) found.push_back(static_cast<int32_t>(i));
  std::stable_sort(found.begin(), found.end(), [&](int32_t a, int32_t b) {
    return nodes_[static_cast<size_t>(a)].reach > nodes_[static_cast<size_t>(b)].reach;
  });
  if (found.size() > count) found.resize(count);
  return found;
}

void DraftTree::merge(const int32_t* guesses, int count, const double* likely) {
  int32_t parent = -1;
  double reach = 1;
  for (int i = 0; i < count; ++i) {
    reach *= likely[i];
    size_t at = 0;
    while (at < nodes_.size() && (nodes_[at].parent != parent || nodes_[at].token != guesses[i])) ++at;
    if (at == nodes_.size()) add(parent, guesses[i], 0.0f, 0.0, 0);
    nodes_[at].reach = std::max(nodes_[at].reach, reach);
    parent = static_cast<int32_t>(at);
  }
}

int DraftTree::proposals(std::vector<Proposal>* out) const {
  int count = 0;
  visit(-1, -1, out, &count);
  return count;
}

void DraftTree::visit(int32_t parent, int32_t place, std::vector<Proposal>* out, int* count) const {
  for (size_t i = 0; i < nodes_.size(); ++i) {  // siblings were added by falling probability
    const Node& node = nodes_[i];
    if (!node.chosen || node.parent != parent || *count >= static_cast<int>(out->size())) continue;
    Proposal& proposal = (*out)[static_cast<size_t>(*count)];
    proposal = Proposal();
    proposal.token = node.token;
    proposal.parent = place;
    proposal.chance = node.chance;
    visit(static_cast<int32_t>(i), (*count)++, out, count);
  }
}

}  // namespace edgec
