#include "status.h"

#include <cstdio>

namespace edgec {
namespace {

// A fixed buffer: reporting "out of memory" must not allocate.
thread_local char last_error[1024] = "";

}  // namespace

edgec_status fail(edgec_status status, const char* message) noexcept {
  std::snprintf(last_error, sizeof(last_error), "%s", message);
  return status;
}

void clear_error() noexcept { last_error[0] = '\0'; }

}  // namespace edgec

const char* edgec_last_error(void) { return edgec::last_error; }

uint32_t edgec_abi_version(void) { return EDGEC_ABI_VERSION; }
