#include "check.h"

#include <cstring>

// check [NAME…]: run the tests whose names contain one of the arguments; all of them without arguments.
int main(int argc, char** argv) {
  int ran = 0;
  for (const check::Test& test : check::tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    const int before = check::failures();
    test.run();
    std::printf("%s %s\n", check::failures() == before ? "ok    " : "FAILED", test.name);
    ++ran;
  }
  std::printf("%d tests, %d failed checks\n", ran, check::failures());
  return ran > 0 && check::failures() == 0 ? 0 : 1;
}
