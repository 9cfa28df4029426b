// The kernels, written once over the vectors of simd_*.h. Each kernels_<set>.cc
// includes this text after the vectors of its instruction set, inside a namespace of
// its own: none of these files stands alone.

// clang-format off: each builds on those above.
#include "groups.h"
#include "codes.h"
#include "signs.h"
#include "levels.h"
#include "votes.h"
#include "blocks.h"
#include "error_feedback.h"
#include "sparse.h"
// clang-format on
