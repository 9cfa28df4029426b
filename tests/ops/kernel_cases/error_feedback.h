// Buffers and calls of the kernels for error feedback with scaled signs.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_ERROR_FEEDBACK_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_ERROR_FEEDBACK_H_

#include <cstdint>
#include <string>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/word_format.h"
#include "inputs.h"

namespace tfgradcomp_cases {

using tfgradcomp_format::SlotsFor;

template <typename Visit>
void VisitBuffers(SignErrorFeedback& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  if (a.momentum != nullptr) visit.Input(a.momentum, a.size);
  visit.Input(a.residual, a.size);
  visit.Input(a.ratio, 1);
  visit.Input(a.moving, 1);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, SlotsFor(a.size, a.num_blocks));
  if (a.momentum != nullptr) visit.Output(a.new_momentum, a.size);
  visit.Output(a.new_residual, a.size);
  visit.Output(a.scale, a.num_blocks);
  visit.Output(a.words, WordsFor(a.size, 2));
}

template <typename Visit>
void VisitBuffers(MeanSignErrorFeedback& a, Visit& visit) {
  visit.Input(a.sent_words, a.num_workers * WordsFor(a.size, 2));
  visit.Input(a.sent_scale, a.num_workers * a.num_blocks);
  visit.Input(a.residual, a.size);
  visit.Input(a.ratio, 1);
  visit.Input(a.moving, 1);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, SlotsFor(a.size, a.num_blocks));
  visit.Output(a.new_residual, a.size);
  visit.Output(a.scale, a.num_blocks);
  visit.Output(a.words, WordsFor(a.size, 2));
}

template <typename Visit>
void VisitBuffers(MeanSignSums& a, Visit& visit) {
  visit.Input(a.sent_words, a.num_workers * WordsFor(a.size, 2));
  visit.Input(a.sent_scale, a.num_workers * a.num_blocks);
  visit.Input(a.residual, a.size);
  visit.Input(a.ratio, 1);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, SlotsFor(a.size, a.num_blocks));
  visit.Output(a.l1, a.num_blocks);
  visit.Output(a.words, WordsFor(a.size, 2));
}

template <typename Visit>
void VisitBuffers(MeanSignResidual& a, Visit& visit) {
  visit.Input(a.sent_words, a.num_workers * WordsFor(a.size, 2));
  visit.Input(a.sent_scale, a.num_workers * a.num_blocks);
  visit.Input(a.residual, a.size);
  visit.Input(a.ratio, 1);
  visit.Input(a.moving, 1);
  visit.Input(a.words, WordsFor(a.size, 2));
  visit.Input(a.scale, a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.new_residual, a.size);
}

template <typename Run>
void ForEachCallOfErrorFeedback(Inputs& in, Run&& run) {
  const int64_t n = in.size;
  const int64_t workers = in.num_workers;
  const int64_t blocks = in.num_blocks;
  const int64_t* const splits = in.row_splits.data();
  const bool* const flags[] = {in.no.data(), in.yes.data()};

  const Array<uint32_t> signs = in.Words(2);
  for (const bool* moving : flags) {
    const std::string moves = With("moving", *moving);
    for (const float* momentum : {static_cast<const float*>(nullptr),
                                  static_cast<const float*>(in.momentum.data())}) {
      run("SignErrorFeedback" + moves + With("momentum", momentum != nullptr),
          SignErrorFeedback{in.x.data(),
                            momentum,
                            in.residual.data(),
                            n,
                            0.9f,
                            in.ratio.data(),
                            moving,
                            splits,
                            blocks,
                            {},
                            {},
                            {},
                            {},
                            {}});
    }
    run("MeanSignErrorFeedback" + moves, MeanSignErrorFeedback{signs.data(),
                                                               in.scale.data(),
                                                               workers,
                                                               in.residual.data(),
                                                               n,
                                                               in.ratio.data(),
                                                               moving,
                                                               splits,
                                                               blocks,
                                                               {},
                                                               {},
                                                               {},
                                                               {}});
    // Any words will do; here they are words that a worker sent.
    run("MeanSignResidual" + moves, MeanSignResidual{signs.data(),
                                                     in.wild_scale.data(),
                                                     workers,
                                                     in.residual.data(),
                                                     n,
                                                     in.ratio.data(),
                                                     moving,
                                                     signs.data(),
                                                     in.scale.data(),
                                                     splits,
                                                     blocks,
                                                     {}});
  }
  run("MeanSignSums", MeanSignSums{signs.data(),
                                   in.scale.data(),
                                   workers,
                                   in.residual.data(),
                                   n,
                                   in.ratio.data(),
                                   splits,
                                   blocks,
                                   {},
                                   {},
                                   {}});
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_ERROR_FEEDBACK_H_
