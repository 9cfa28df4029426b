// Buffers and calls of the kernels for signs.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_SIGNS_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_SIGNS_H_

#include <cstdint>
#include <string>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/word_format.h"
#include "inputs.h"

namespace tfgradcomp_cases {

template <typename Visit>
void VisitBuffers(PackSigns& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  if (a.stream != nullptr) visit.Input(a.stream, 3);
  visit.Output(a.words, WordsFor(a.size, 2));
  visit.Output(a.nonfinite, 1);
}

template <typename Visit>
void VisitBuffers(PackMomentumSigns& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.momentum, a.size);
  visit.Input(a.warming_up, 1);
  if (a.stream != nullptr) visit.Input(a.stream, 3);
  visit.Output(a.new_momentum, a.size);
  visit.Output(a.words, WordsFor(a.size, 2));
  visit.Output(a.nonfinite, 1);
}

template <typename Visit>
void VisitBuffers(MeanOfSigns& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * WordsFor(a.size, 2));
  visit.Input(a.scale, a.num_workers * a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.values.whole, a.size);
}

template <typename Run>
void ForEachCallOfSigns(Inputs& in, bool independent_of_blocks, Run&& run) {
  const int64_t n = in.size;
  const int64_t workers = in.num_workers;
  const int64_t blocks = in.num_blocks;
  const int64_t* const splits = in.row_splits.data();
  const uint64_t* const streams[] = {nullptr, in.stream.data()};
  const bool* const flags[] = {in.no.data(), in.yes.data()};

  const Array<uint32_t> signs = in.Words(2);
  run("MeanOfSigns",
      MeanOfSigns{signs.data(), in.wild_scale.data(), workers, n, splits, blocks, {}});

  if (!independent_of_blocks) return;
  for (const uint64_t* stream : streams) {
    const std::string drawn = With("stream", stream != nullptr);
    run("PackSigns" + drawn, PackSigns{in.wild.data(), n, stream, {}, {}});
    for (const bool* warming_up : flags) {
      run("PackMomentumSigns" + drawn + With("warming_up", *warming_up),
          PackMomentumSigns{in.x.data(),
                            in.momentum.data(),
                            n,
                            0.9f,
                            0.1f,
                            warming_up,
                            stream,
                            {},
                            {},
                            {}});
    }
  }
  const Array<float> zeros(n);
  run("PackSigns zeros", PackSigns{zeros.data(), n, streams[1], {}, {}});
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_SIGNS_H_
