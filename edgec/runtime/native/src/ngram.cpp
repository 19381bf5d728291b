#include "ngram.h"

#include <algorithm>

namespace edgec {

NgramMatch find_ngram(const std::vector<int32_t>& tokens, int32_t least, int32_t most, int32_t window) {
  const int32_t count = static_cast<int32_t>(tokens.size());
  NgramMatch best;
  const int32_t first = std::max(0, count - window);
  for (int32_t end = count - 2; end >= first && best.length < most; --end) {
    int32_t length = 0;
    while (length < most && end - length >= 0 && tokens[end - length] == tokens[count - 1 - length]) ++length;
    if (length >= least && length > best.length) best = {length, end + 1};
  }
  return best;
}

}  // namespace edgec
