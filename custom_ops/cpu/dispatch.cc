// The choice of the instruction set, made once, by the processor.

#include <atomic>
#include <cstring>

#include "table.h"

namespace tfgradcomp {
namespace {

bool Has(const KernelTable& table) {
#if defined(__x86_64__)
  if (&table == &kAvx512Kernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("bmi2");
  }
  if (&table == &kAvx2Kernels) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  }
#endif
  return &table == &kPortableKernels;
}

const KernelTable* const kTables[] = {
#if defined(__x86_64__)
    &kAvx512Kernels, &kAvx2Kernels,
#endif
    &kPortableKernels};

const KernelTable* Best() {
  for (const KernelTable* table : kTables) {
    if (Has(*table)) return table;
  }
  return &kPortableKernels;
}

std::atomic<const KernelTable*>& Current() {
  static std::atomic<const KernelTable*> table{Best()};
  return table;
}

}  // namespace

const char* InstructionSet() { return Current().load()->name; }

bool SetInstructionSet(const char* name) {
  for (const KernelTable* table : kTables) {
    if (std::strcmp(table->name, name) == 0 && Has(*table)) {
      Current() = table;
      return true;
    }
  }
  return false;
}

#define TFGRADCOMP_DEFINE(Kernel)                          \
  void Run(const Parallel& parallel, const Kernel& args) { \
    Current().load()->run_##Kernel(parallel, args);        \
  }
TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_DEFINE)
#undef TFGRADCOMP_DEFINE

}  // namespace tfgradcomp

const char* tfgradcomp_cpu_instruction_set() { return tfgradcomp::InstructionSet(); }

bool tfgradcomp_cpu_set_instruction_set(const char* name) {
  return tfgradcomp::SetInstructionSet(name);
}

#define TFGRADCOMP_DEFINE(Kernel)                                   \
  void tfgradcomp_cpu_##Kernel(const tfgradcomp::Kernel* args) {    \
    tfgradcomp::Run(tfgradcomp::Parallel{nullptr, nullptr}, *args); \
  }
TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_DEFINE)
#undef TFGRADCOMP_DEFINE
