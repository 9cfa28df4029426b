// The kernels in AVX-512 F, BW, DQ and VL.

#if defined(__x86_64__)

#include <immintrin.h>

#include "../chunks.h"
#include "../matrices.h"
#include "../word_format.h"
#include "table.h"

namespace tfgradcomp {
namespace {

using namespace tfgradcomp_format;  // NOLINT: this file is one namespace.

#include "simd_avx512.h"
// Must follow the vectors.
#include "kernels_impl.h"

}  // namespace

const KernelTable kAvx512Kernels = {
    "avx512", TFGRADCOMP_FOR_EACH_CPU_KERNEL(TFGRADCOMP_TABLE_ENTRY)};

}  // namespace tfgradcomp

#endif  // __x86_64__
