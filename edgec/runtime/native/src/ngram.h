// A draft without a model: what followed the last time that the text ended as it ends now ("prompt lookup", Saxena
// 2023).
#ifndef EDGEC_NGRAM_H
#define EDGEC_NGRAM_H

#include <cstdint>
#include <vector>

namespace edgec {

struct NgramMatch {
  int32_t length = 0;  // tokens of the ending that were found again; 0: none
  int32_t next = 0;    // position of what followed there
};

// The longest earlier occurrence of the ending of `tokens`, of at least `least` and at most `most` tokens; of equal
// ones the latest. Looks at the latest `window` tokens only, which bounds what a step pays for it.
NgramMatch find_ngram(const std::vector<int32_t>& tokens, int32_t least, int32_t most, int32_t window);

}  // namespace edgec

#endif  // EDGEC_NGRAM_H
