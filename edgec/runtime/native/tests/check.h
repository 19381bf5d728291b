// A test harness of forty lines: TEST registers, CHECK counts and prints, main (in check.cpp) runs what its arguments
// name.
#ifndef EDGEC_CHECK_H
#define EDGEC_CHECK_H

#include <cstdio>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline std::string show(const std::string& value) { return "\"" + value + "\""; }
inline std::string show(const char* value) { return value; }
inline std::string show(bool value) { return value ? "true" : "false"; }
template <typename T>
std::string show(const T& value) {
  return std::to_string(value);
}

inline void report(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  failures() += 1;
}

}  // namespace check

#define TEST(name)                                                   \
  static void test_##name();                                         \
  static const check::Register register_##name(#name, &test_##name); \
  static void test_##name()

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) check::report(__FILE__, __LINE__, "not true: " #condition); \
  } while (false)

#define CHECK_EQ(a, b)                                                                                       \
  do {                                                                                                       \
    const auto& check_a = (a);                                                                               \
    const auto& check_b = (b);                                                                               \
    if (!(check_a == check_b))                                                                               \
      check::report(__FILE__, __LINE__, #a " is " + check::show(check_a) + ", not " + check::show(check_b)); \
  } while (false)

#define CHECK_THROWS(expression, wanted)                                                         \
  do {                                                                                           \
    bool check_thrown = false;                                                                   \
    try {                                                                                        \
      expression;                                                                                \
    } catch (const edgec::Error& error) {                                                        \
      check_thrown = error.status() == (wanted);                                                 \
    }                                                                                            \
    if (!check_thrown) check::report(__FILE__, __LINE__, #expression " did not throw " #wanted); \
  } while (false)

#endif  // EDGEC_CHECK_H
