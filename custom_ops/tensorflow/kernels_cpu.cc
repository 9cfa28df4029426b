// The ops on a CPU, in TensorFlow's own threads.

#include <cstdint>

#include "../cpu/cpu.h"
#include "op_kernels.h"
#include "tcp_kernels.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/lib/core/threadpool.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tfgradcomp {
namespace {

using CpuWorkerThreads = ::tensorflow::DeviceBase::CpuWorkerThreads;

// Below this, waking threads takes longer than they save.
constexpr int64_t kBytesForThreads = 256 * 1024;

// Gives a thread the floating-point state of the op's thread while it works for the op.
// TensorFlow's threads flush denormals to zero and the main thread does not; a result
// must not depend on the thread that computes it.
class FloatingPointState {
 public:
#if defined(__x86_64__)
  static unsigned Current() { return _mm_getcsr(); }
  explicit FloatingPointState(unsigned state) : before_(_mm_getcsr()) {
    _mm_setcsr(state);
  }
  ~FloatingPointState() { _mm_setcsr(before_); }
#else
  static unsigned Current() { return 0; }
  explicit FloatingPointState(unsigned state) : before_(state) {}
#endif
  FloatingPointState(const FloatingPointState&) = delete;
  FloatingPointState& operator=(const FloatingPointState&) = delete;

 private:
  const unsigned before_;
};

void RunInPool(void* pool, int64_t units, int64_t bytes_per_unit,
               void (*body)(void* closure, int64_t begin, int64_t end), void* closure) {
  const auto* threads = static_cast<const CpuWorkerThreads*>(pool);
  if (threads->num_threads < 2 || units < 2 ||
      units * bytes_per_unit < kBytesForThreads) {
    body(closure, 0, units);
    return;
  }
  const unsigned state = FloatingPointState::Current();
  // The cost of a unit is in cycles; a byte takes about one cycle.
  threads->workers->ParallelFor(units, bytes_per_unit,
                                [body, closure, state](int64_t begin, int64_t end) {
                                  FloatingPointState same(state);
                                  body(closure, begin, end);
                                });
}

struct OnCpu {
  static constexpr bool kOnHost = true;

  template <typename Args>
  static absl::Status Launch(OpKernelContext* context, const Args& args) {
    const CpuWorkerThreads* threads =
        context->device()->tensorflow_cpu_worker_threads();
    Run(Parallel{RunInPool, const_cast<CpuWorkerThreads*>(threads)}, args);
    return absl::OkStatus();
  }

  static absl::Status Read(OpKernelContext*, const int64_t* number, int64_t* copy) {
    *copy = *number;
    return absl::OkStatus();
  }
};

#define TFGRADCOMP_REGISTER(Kernel) \
  TFGRADCOMP_REGISTER_KERNEL(Kernel, tensorflow::DEVICE_CPU, OnCpu);
TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_REGISTER)

#define TFGRADCOMP_REGISTER_UPDATING(Kernel)                           \
  REGISTER_KERNEL_BUILDER(                                             \
      Name("Tfgradcomp>Apply" #Kernel).Device(tensorflow::DEVICE_CPU), \
      Kernel##Op<OnCpu>);
TFGRADCOMP_FOR_EACH_UPDATING_KERNEL(TFGRADCOMP_REGISTER_UPDATING)

}  // namespace
}  // namespace tfgradcomp
