// The kernels for callers without C++.

#include "cuda.h"

extern "C" {
#define TFGRADCOMP_EXPORT(Kernel)                                                      \
  const char* tfgradcomp_cuda_##Kernel(void* stream, const tfgradcomp::Kernel* args) { \
    return tfgradcomp::Run(tfgradcomp::Gpu{stream}, *args);                            \
  }
TFGRADCOMP_FOR_EACH_KERNEL(TFGRADCOMP_EXPORT)
#undef TFGRADCOMP_EXPORT
}
