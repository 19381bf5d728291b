#include "row_loops.h"

#include <cstring>

#include "row_loops.inc"

namespace edgec {

#if defined(__x86_64__)
extern const RowLoops kRowLoopsAvx2;  // kernels/row_loops_avx2.cpp
#endif

const RowLoops& plain_row_loops() {
  static constexpr RowLoops kPlain = {extent, exponentials, exponential_sum, sum, race};
  return kPlain;
}

const RowLoops& row_loops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return kRowLoopsAvx2;
#endif
  return plain_row_loops();
}

}  // namespace edgec
