// The proposals of one sequence as a tree: several candidates for a place, each with what may follow it. One pass
// verifies them all, and the branch that the model takes is kept (Miao et al., "SpecInfer", 2024; Li et al., "EAGLE-2",
// 2024). No proposal is drawn: the model's own token, drawn as ever, is looked for among them, so no token changes.
#ifndef EDGEC_DRAFT_TREE_H
#define EDGEC_DRAFT_TREE_H

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sampler.h"

namespace edgec {

constexpr int kWidestTree = 4;  // candidates for a place, and nodes of a level that are followed
constexpr int kLevelRows = 16;  // nodes of a level that are followed in all trees together, but one in each

class DraftTree {
 public:
  struct Node {
    int32_t token;
    int32_t parent;  // −1: the newest token
    int32_t depth;   // 0: the first place after it
    float chance;    // of being kept when its parent was, in the head's view; 0: not the head's
    double reach;    // that it is kept, all the way from the root, as far as is known
    size_t state;    // row of the drafter's states behind its parent
    bool chosen;
  };

  void clear();
  const std::vector<Node>& nodes() const { return nodes_; }

  // A candidate behind `parent`, kept with probability `likely` when its parent is.
  void add(int32_t parent, int32_t token, float chance, double likely, size_t state);
  // The nodes of the deepest level, by falling reach: at most `count`, and only such as are among the `most` likeliest
  // of the tree, which is as many as will be chosen. What follows the others is less likely than they are.
  std::vector<int32_t> frontier(size_t count, size_t most) const;

  // Guesses of what follows the newest token, one behind the other, each kept with probability likely[i] when those
  // before it are. Nodes that are there already may become likelier.
  void merge(const int32_t* guesses, int count, const double* likely);

  // A node may be chosen when its parent is.
  void choose(int32_t node) { nodes_[static_cast<size_t>(node)].chosen = true; }
  // The chosen nodes, each behind its parent, more likely branches first, as proposals that know their parents.
  int proposals(std::vector<Proposal>* out) const;

 private:
  void visit(int32_t parent, int32_t place, std::vector<Proposal>* out, int* count) const;

  std::vector<Node> nodes_;
};

}  // namespace edgec

#endif  // EDGEC_DRAFT_TREE_H
