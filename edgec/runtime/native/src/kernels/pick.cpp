// Which kernel sets this CPU can run.
#include <cstring>
#include <string>

#include "../status.h"
#include "kernels.h"
#include "sets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace edgec {
namespace {

#if defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

#if defined(__x86_64__)
bool has_avxvnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    found.push_back(&kAvx512Vnni);
  if (has_avxvnni()) found.push_back(&kAvxVnni);
  if (__builtin_cpu_supports("avx2")) found.push_back(&kAvx2);
#elif defined(__aarch64__)
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1UL << 20, kI8mmBit = 1UL << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  const bool dotprod = (getauxval(AT_HWCAP) & kAsimdDp) != 0;
  const bool i8mm = dotprod && (getauxval(AT_HWCAP2) & kI8mmBit) != 0;
#elif defined(__APPLE__)
  const bool dotprod = has_feature("hw.optional.arm.FEAT_DotProd");
  const bool i8mm = dotprod && has_feature("hw.optional.arm.FEAT_I8MM");
#else
  const bool dotprod = false, i8mm = false;
#endif
  if (i8mm) found.push_back(&kI8mm);
  if (dotprod) found.push_back(&kDotprod);
  found.push_back(&kNeon);
#endif
  found.push_back(&kScalar);
  return found;
}

const Kernels& pick_kernels(const char* name) {
  const std::vector<const Kernels*> usable = usable_kernels();
  if (name == nullptr || name[0] == '\0') return *usable.front();
  std::string known;
  for (const Kernels* kernels : usable) {
    if (std::strcmp(kernels->name, name) == 0) return *kernels;
    known += known.empty() ? "" : ", ";
    known += kernels->name;
  }
  throw Error(EDGEC_UNSUPPORTED, "kernel `" + std::string(name) + "` can't run here; this CPU has: " + known);
}

}  // namespace edgec
