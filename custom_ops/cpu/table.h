// One table of kernels for each instruction set.

#ifndef TFGRADCOMP_CUSTOM_OPS_CPU_TABLE_H_
#define TFGRADCOMP_CUSTOM_OPS_CPU_TABLE_H_

#include "cpu.h"

namespace tfgradcomp {

struct KernelTable {
  const char* name;
#define TFGRADCOMP_MEMBER(Kernel) void (*run_##Kernel)(const Parallel&, const Kernel&);
  TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_MEMBER)
#undef TFGRADCOMP_MEMBER
};

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace tfgradcomp

// The table of the kernels that kernels_impl.h has just defined.
#define TFGRADCOMP_TABLE_ENTRY(Name) \
  [](const Parallel& parallel, const Name& args) { Kernel(parallel, args); },

#endif  // TFGRADCOMP_CUSTOM_OPS_CPU_TABLE_H_
