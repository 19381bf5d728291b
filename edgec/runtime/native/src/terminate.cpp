// What an exception that nobody catches calls. The C interface lets none out, so it is never more than an abort; but
// libstdc++'s own handler prints the exception's name, and brings a demangler of 50 KB into every library that
// libstdc++ is linked into statically. A definition of this variable, which is libstdc++'s interface for replacing the
// handler at link time, leaves both out.
#include <cstdlib>
#include <exception>

#if defined(__GLIBCXX__)
namespace __cxxabiv1 {
extern std::terminate_handler __terminate_handler;
std::terminate_handler __terminate_handler = std::abort;
}  // namespace __cxxabiv1
#endif
