// Wall time for measuring; decides nothing that a token depends on.
#ifndef EDGEC_CLOCK_H
#define EDGEC_CLOCK_H

#include <chrono>

namespace edgec {

// Seconds since some moment in the past.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace edgec

#endif  // EDGEC_CLOCK_H
