#if defined(__x86_64__)

#include <cstring>

#include "../row_loops.h"
#include "../row_loops.inc"

namespace edgec {

extern const RowLoops kRowLoopsAvx2;
const RowLoops kRowLoopsAvx2 = {extent, exponentials, exponential_sum, sum, race};

}  // namespace edgec

#endif
