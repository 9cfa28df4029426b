// Compares the CUDA kernels, emulated, to those of the CPU.

#include <cuda_runtime.h>

#include <cstdio>

#include "../../custom_ops/cpu/cpu.h"
#include "../../custom_ops/cuda/cuda.h"
#include "cases.h"

namespace {

struct Cpu {
  template <typename Kernel>
  void operator()(const Kernel& args) {
    tfgradcomp::Run(tfgradcomp::Parallel{nullptr, nullptr}, args);
  }
};

struct EmulatedGpu {
  template <typename Kernel>
  void operator()(const Kernel& args) {
    tfgradcomp::Run(tfgradcomp::Gpu{nullptr}, args);
  }
};

}  // namespace

int main() {
  Cpu cpu;
  EmulatedGpu gpu;
  bool equal = true;
  for (bool reverse : {false, true}) {
    cuda_emulator::ReverseOrder(reverse);
    tfgradcomp_cases::Comparison<Cpu, EmulatedGpu> comparison(cpu, gpu);
    for (const auto& shape : tfgradcomp_cases::Shapes(10000)) comparison.Run(shape);
    std::printf("%s order: %lld calls, %lld differences\n%s",
                reverse ? "reverse" : "forward",
                static_cast<long long>(comparison.calls()),
                static_cast<long long>(comparison.differences()),
                comparison.report().c_str());
    equal = equal && comparison.differences() == 0;
  }
  return equal ? 0 : 1;
}
