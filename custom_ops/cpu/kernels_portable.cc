// The kernels for any processor.

#include "../chunks.h"
#include "../matrices.h"
#include "../word_format.h"
#include "table.h"

namespace tfgradcomp {
namespace {

using namespace tfgradcomp_format;  // NOLINT: this file is one namespace.

#include "simd_portable.h"
// Must follow the vectors.
#include "kernels_impl.h"

}  // namespace

const KernelTable kPortableKernels = {
    "portable", TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_TABLE_ENTRY)};

}  // namespace tfgradcomp
