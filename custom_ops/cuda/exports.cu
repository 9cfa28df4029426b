// The kernels for callers without C++, and whether this machine's driver can run them.

#include <cuda_runtime.h>

#include <cstdio>

#include "cuda.h"

namespace tfgradcomp {

const char* DriverProblem() {
  static char problem[160];
  int driver = 0;
  // Asks the driver's library alone, which needs no GPU and starts no CUDA.
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return nullptr;
  if (driver / 1000 >= CUDART_VERSION / 1000) return nullptr;
  std::snprintf(problem, sizeof(problem),
                "they were compiled with CUDA %d.%d, and the driver runs CUDA up to "
                "%d.%d only",
                CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, driver / 1000,
                driver % 1000 / 10);
  return problem;
}

}  // namespace tfgradcomp

extern "C" {
#define TFGRADCOMP_EXPORT(Kernel)                                                      \
  const char* tfgradcomp_cuda_##Kernel(void* stream, const tfgradcomp::Kernel* args) { \
    return tfgradcomp::Run(tfgradcomp::Gpu{stream}, *args);                            \
  }
TFGRADCOMP_FOR_EACH_KERNEL(TFGRADCOMP_EXPORT)
#undef TFGRADCOMP_EXPORT

const char* tfgradcomp_cuda_driver_problem() { return tfgradcomp::DriverProblem(); }
}
