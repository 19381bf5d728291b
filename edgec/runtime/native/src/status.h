// Errors inside the core, and the door through which they leave it.
#ifndef EDGEC_STATUS_H
#define EDGEC_STATUS_H

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "edgec.h"

namespace edgec {

// The only exception of ours. `guard` turns it into a status and a message; nothing else may cross the C ABI.
class Error : public std::exception {
 public:
  Error(edgec_status status, std::string message) : status_(status), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  edgec_status status() const noexcept { return status_; }

 private:
  edgec_status status_;
  std::string message_;
};

// Remember `message` for this thread's edgec_last_error(); gives `status` back.
edgec_status fail(edgec_status status, const char* message) noexcept;
void clear_error() noexcept;

// Run a C ABI function's body. `body` returns nothing; it throws Error when something is wrong.
template <typename Body>
edgec_status guard(Body&& body) noexcept {
  clear_error();
  try {
    body();
    return EDGEC_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(EDGEC_OVER_BUDGET, "the system has no memory left for this");
  } catch (const std::exception& error) {
    return fail(EDGEC_INTERNAL, error.what());
  } catch (...) {
    return fail(EDGEC_INTERNAL, "an unknown exception");
  }
}

inline void require(bool condition, edgec_status status, const char* message) {
  if (!condition) throw Error(status, message);
}

}  // namespace edgec

#endif  // EDGEC_STATUS_H
