// Buffers and calls of the kernels for statistics of blocks.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_BLOCKS_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_BLOCKS_H_

#include <cstdint>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/word_format.h"
#include "inputs.h"

namespace tfgradcomp_cases {

using tfgradcomp_format::SlotsFor;

template <typename Visit>
void VisitBuffers(BlockStatistics& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, 5 * SlotsFor(a.size, a.num_blocks));
  visit.Output(a.statistics, 5 * a.num_blocks);
}

template <typename Run>
void ForEachCallOfBlocks(Inputs& in, Run&& run) {
  const int64_t n = in.size;
  const int64_t blocks = in.num_blocks;
  const int64_t* const splits = in.row_splits.data();

  const int64_t all = kSumL1 | kSumSquares | kSumPlain;
  run("BlockStatistics",
      BlockStatistics{in.wild.data(), n, splits, blocks, all, {}, {}});
  // Finite numbers, too, because only their sums show the order of summation.
  run("BlockStatistics finite",
      BlockStatistics{in.residual.data(), n, splits, blocks, all, {}, {}});
  for (const int64_t sums : {int64_t{0}, kSumSquares | kSumPlain}) {
    run("BlockStatistics" + With("sums", sums),
        BlockStatistics{in.wild.data(), n, splits, blocks, sums, {}, {}});
  }
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_BLOCKS_H_
