// The ops as TensorFlow sees them: their names, arguments and static shapes.
// ../kernels.h states what they compute; their kernels check the values of the
// arguments.
//
// An optional argument is a list of at most one tensor. The vector x is the list of its
// parts, in order and of any shapes; each element is multiplied by x_scale. The values
// that an op writes are a list of parts of the given sizes.
//
// The families of ops are headers, compiled together here, because parsing TensorFlow's
// headers takes longer than compiling all ops.

#include "blocks_ops.h"
#include "chunks_ops.h"
#include "codes_ops.h"
#include "error_feedback_ops.h"
#include "levels_ops.h"
#include "low_rank_ops.h"
#include "pairs_ops.h"
#include "residuals_ops.h"
#include "signs_ops.h"
#include "sparse_ops.h"
#include "tcp_ops.h"
#include "votes_ops.h"

// Returns how this library was built, for `python -m tfgradcomp.ops --info`.
extern "C" __attribute__((visibility("default"))) const char* tfgradcomp_built_with() {
  return TFGRADCOMP_BUILT_WITH;
}
