// The calls of all kernels.
//
// Each family of kernels has a header with these functions:
//
// VisitBuffers(args, visit) calls visit.Input(pointer, count) for each array that the
// kernel reads, .Scratch and .Output for the arrays that it writes, and .Some for an
// array of which it writes as many elements as another array says. The pointers are the
// struct's own fields.
//
// ForEachCallOf<Family>(in, independent_of_blocks, run) calls run(name, args) for every
// call of the family. Calls that do not depend on the blocks are made only where
// `independent_of_blocks` is true; families without such calls do not take the
// argument.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CALLS_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CALLS_H_

#include "blocks.h"
#include "codes.h"
#include "error_feedback.h"
#include "inputs.h"
#include "largest.h"
#include "levels.h"
#include "low_rank.h"
#include "signs.h"
#include "sparse.h"
#include "votes.h"

namespace tfgradcomp_cases {

// Calls run(name, args) for every kernel and every way to call it. The struct's name
// comes first in `name`, then the arguments that its calls differ in.
template <typename Run>
void ForEachCall(Inputs& in, bool independent_of_blocks, Run&& run) {
  ForEachCallOfCodes(in, independent_of_blocks, run);
  ForEachCallOfBlocks(in, run);
  ForEachCallOfSigns(in, independent_of_blocks, run);
  ForEachCallOfErrorFeedback(in, run);
  ForEachCallOfLevels(in, run);
  ForEachCallOfLargest(in, run);
  ForEachCallOfLowRank(in, independent_of_blocks, run);
  ForEachCallOfSparse(in, run);
  ForEachCallOfVotes(in, independent_of_blocks, run);
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CALLS_H_
