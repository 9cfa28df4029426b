// The kernels on a GPU. Free of CUDA's headers, so that any C++ file may include it.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_CUDA_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_CUDA_H_

#include "../kernels.h"

namespace tfgradcomp {

// Puts a kernel on a stream (a cudaStream_t) of the current device. Pointers are to
// device memory. Returns null, or CUDA's message if it could not be launched.
struct Gpu {
  void* stream;
};

#define TFGRADCOMP_DECLARE(Kernel) const char* Run(const Gpu& gpu, const Kernel& args);
TFGRADCOMP_FOR_EACH_KERNEL(TFGRADCOMP_DECLARE)
#undef TFGRADCOMP_DECLARE

// Copies a number from the device after all earlier work of the stream. Returns null or
// CUDA's message.
const char* ReadNumber(const Gpu& gpu, const int64_t* number, int64_t* copy);

// Returns null, or why no kernel can run on this machine: its driver is older than the
// CUDA of the kernels. Without a driver there is no GPU, and this returns null.
const char* DriverProblem();

}  // namespace tfgradcomp

// For callers without C++: tfgradcomp_cuda_PackCodes(stream, args), ...
extern "C" {
#define TFGRADCOMP_DECLARE(Kernel) \
  const char* tfgradcomp_cuda_##Kernel(void* stream, const tfgradcomp::Kernel* args);
TFGRADCOMP_FOR_EACH_KERNEL(TFGRADCOMP_DECLARE)
#undef TFGRADCOMP_DECLARE

const char* tfgradcomp_cuda_driver_problem();
}

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_CUDA_H_
