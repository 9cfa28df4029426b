// The kernels on the CPU.

#ifndef TFGRADCOMP_CUSTOM_OPS_CPU_CPU_H_
#define TFGRADCOMP_CUSTOM_OPS_CPU_CPU_H_

#include <new>

#include "../kernels.h"

namespace tfgradcomp {

// Threads for a kernel: `run` calls body(closure, begin, end) for ranges that
// cover [0, units) once, in any threads, and returns when all have returned.
// `bytes_per_unit` is the memory that one unit moves. A null `run`: no threads.
struct Parallel {
  void (*run)(void* pool, int64_t units, int64_t bytes_per_unit,
              void (*body)(void* closure, int64_t begin, int64_t end), void* closure);
  void* pool;
};

// The best instruction set of this machine: "portable", "avx2" or "avx512".
const char* InstructionSet();

// Takes another one, for tests and benchmarks; returns whether this machine has it.
bool SetInstructionSet(const char* name);

#define TFGRADCOMP_DECLARE(Kernel) \
  void Run(const Parallel& parallel, const Kernel& args);
TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_DECLARE)
#undef TFGRADCOMP_DECLARE

}  // namespace tfgradcomp

// For callers without C++: tfgradcomp_cpu_PackCodes(args), ..., in one thread.
extern "C" {
const char* tfgradcomp_cpu_instruction_set();
bool tfgradcomp_cpu_set_instruction_set(const char* name);
#define TFGRADCOMP_DECLARE(Kernel) \
  void tfgradcomp_cpu_##Kernel(const tfgradcomp::Kernel* args);
TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_DECLARE)
#undef TFGRADCOMP_DECLARE
}

#endif  // TFGRADCOMP_CUSTOM_OPS_CPU_CPU_H_
