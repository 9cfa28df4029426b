// Buffers and calls of the kernels for sparse words.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_SPARSE_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_SPARSE_H_

#include <cstdint>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/word_format.h"
#include "inputs.h"

namespace tfgradcomp_cases {

using tfgradcomp_format::SparseScratch;

template <typename Visit>
void VisitBuffers(PackUnambiguous& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.moments.whole, a.size);
  visit.Input(a.residual, a.size);
  visit.Input(a.variance, a.size);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, SparseScratch(a.size, a.num_blocks));
  visit.Output(a.count, 1);
  visit.Some(a.words, a.size, a.count);
  visit.Output(a.exponents, a.num_blocks);
  visit.Output(a.new_residual, a.size);
  visit.Output(a.new_variance, a.size);
  visit.Output(a.nonfinite, 1);
}

template <typename Visit>
void VisitBuffers(PackOverThreshold& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.residual, a.size);
  visit.Input(a.threshold, a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, SparseScratch(a.size, 0));
  visit.Output(a.count, 1);
  visit.Some(a.words, a.size, a.count);
  visit.Output(a.new_residual, a.size);
  visit.Output(a.nonfinite, 1);
  if (a.variance == nullptr) return;
  visit.Input(a.moments.whole, a.size);
  visit.Input(a.variance, a.size);
  visit.Output(a.new_variance, a.size);
}

template <typename Visit>
void VisitBuffers(MeanOfSparse& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * a.num_words);
  visit.Input(a.scale, a.num_workers * a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.values.whole, a.size);
}

template <typename Run>
void ForEachCallOfSparse(Inputs& in, Run&& run) {
  const int64_t n = in.size;
  const int64_t workers = in.num_workers;
  const int64_t blocks = in.num_blocks;
  const int64_t* const splits = in.row_splits.data();

  for (float alpha : {1.5f, 1e-30f, 1e30f}) {
    run("PackUnambiguous" + With("alpha < 1", alpha < 1) + With("> 2", alpha > 2),
        PackUnambiguous{in.x.data(),
                        in.moments.data(),
                        in.residual.data(),
                        in.variance.data(),
                        n,
                        alpha,
                        0.999f,
                        splits,
                        blocks,
                        {},
                        {},
                        {},
                        {},
                        {},
                        {},
                        {}});
  }
  for (uint32_t one_in : {1, 3, 100}) {
    int64_t row;
    const Array<uint32_t> words = in.SparseWords(one_in, &row);
    run("MeanOfSparse" + With("one in", one_in),
        MeanOfSparse{
            words.data(), row, in.scale.data(), workers, n, splits, blocks, {}});
  }

  Array<float> thresholds(blocks);
  for (const float* variance : {static_cast<const float*>(nullptr),
                                static_cast<const float*>(in.variance.data())}) {
    for (float threshold : {0.25f, 1e-6f}) {
      for (int64_t b = 0; b < blocks; ++b) thresholds[b] = threshold * (1 + b % 3);
      CutVector<const float> moments;
      if (variance != nullptr) moments = in.moments.data();
      run("PackOverThreshold" + With("variance", variance != nullptr) +
              With("large", threshold > 0.1f),
          PackOverThreshold{in.x.data(),
                            moments,
                            in.residual.data(),
                            variance,
                            n,
                            thresholds.data(),
                            1.5f,
                            0.999f,
                            splits,
                            blocks,
                            {},
                            {},
                            {},
                            {},
                            {},
                            {}});
    }
  }
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_SPARSE_H_
