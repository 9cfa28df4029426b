// The ops on a GPU. No header of CUDA is needed: TensorFlow hands out the stream, and
// ../cuda launches on it. Compiled only where ../cuda is.

#include "../cuda/cuda.h"
#include "op_kernels.h"
#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/stream.h"

namespace tfgradcomp {
namespace {

struct OnGpu {
  static constexpr bool kOnHost = false;

  template <typename Args>
  static absl::Status Launch(OpKernelContext* context, const Args& args) {
    const char* error = Run(StreamOf(context), args);
    if (error == nullptr) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("CUDA could not launch the kernel: ", error));
  }

  // Waits for all launched work.
  static absl::Status Read(OpKernelContext* context, const int64_t* number,
                           int64_t* copy) {
    const char* error = ReadNumber(StreamOf(context), number, copy);
    if (error == nullptr) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("CUDA could not copy a number: ", error));
  }

 private:
  static Gpu StreamOf(OpKernelContext* context) {
    auto* stream = context->op_device_context()->stream();
    return Gpu{stream->platform_specific_handle().stream};
  }
};

// REGISTER_KERNEL_BUILDER cannot be left out at run time.
#define TFGRADCOMP_REGISTER(Kernel)                                     \
  tensorflow::kernel_factory::OpKernelRegistrar(                        \
      tensorflow::register_kernel::Name("Tfgradcomp>" #Kernel)          \
          .Device(tensorflow::DEVICE_GPU)                               \
          .Build(),                                                     \
      #Kernel "Op<OnGpu>",                                              \
      [](OpKernelConstruction* construction) -> tensorflow::OpKernel* { \
        return new Kernel##Op<OnGpu>(construction);                     \
      });

// Kernels that the driver cannot run are not registered. TensorFlow then places the ops
// on the CPU, where each of them would fail on a GPU.
[[maybe_unused]] const bool kAreRegistered = [] {
  if (DriverProblem() != nullptr) return false;
  TFGRADCOMP_FOR_EACH_KERNEL(TFGRADCOMP_REGISTER)
  return true;
}();

}  // namespace
}  // namespace tfgradcomp
