// The kernels, written once over the vectors of simd_*.h. Each kernels_<set>.cc
// includes this file after the vectors of its instruction set, inside a namespace of
// its own. None of the files below can be included alone: each uses those above it.

// clang-format off
#include "groups.h"
#include "updates.h"
#include "codes.h"
#include "random.h"
#include "signs.h"
#include "ternary.h"
#include "fixed_point.h"
#include "selection.h"
#include "sorted_block.h"
#include "find_levels.h"
#include "levels.h"
#include "votes.h"
#include "blocks.h"
#include "error_feedback.h"
#include "sparse.h"
#include "largest.h"
#include "residuals.h"
#include "matrices.h"
#include "pairs.h"
#include "matrix_products.h"
#include "factors.h"
// clang-format on
