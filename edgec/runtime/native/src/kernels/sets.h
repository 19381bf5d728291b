// The kernel sets by name, each defined in its own file; a set exists where its processor does.
#ifndef EDGEC_KERNEL_SETS_H
#define EDGEC_KERNEL_SETS_H

#include "kernels.h"

namespace edgec {

extern const Kernels kScalar;

#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvxVnni;
extern const Kernels kAvx512Vnni;
#elif defined(__aarch64__)
extern const Kernels kNeon;
extern const Kernels kDotprod;
extern const Kernels kI8mm;
#endif

}  // namespace edgec

#endif  // EDGEC_KERNEL_SETS_H
