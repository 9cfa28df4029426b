// Buffers and calls of the kernels for factors of matrices.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LOW_RANK_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LOW_RANK_H_

#include <cstdint>
#include <vector>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/matrices.h"
#include "inputs.h"

namespace tfgradcomp_cases {

template <typename Visit>
void VisitBuffers(MultiplyMatrices& a, Visit& visit) {
  const MatrixTensor sizes = SizesOf(a);
  visit.Input(a.x.whole, a.size);
  visit.Input(a.right, sizes.right);
  visit.Output(a.products, sizes.left);
}

template <typename Visit>
void VisitBuffers(MultiplyTransposed& a, Visit& visit) {
  const MatrixTensor sizes = SizesOf(a);
  visit.Input(a.x.whole, a.size);
  visit.Input(a.left, sizes.left);
  visit.Scratch(a.scratch, ScratchOf(a));
  visit.Output(a.factors, sizes.value);
}

template <typename Visit>
void VisitBuffers(MultiplyFactors& a, Visit& visit) {
  const MatrixTensor sizes = SizesOf(a);
  visit.Input(a.left, sizes.left);
  visit.Input(a.right, sizes.value);
  visit.Output(a.values.whole, a.size);
}

template <typename Visit>
void VisitBuffers(Orthonormalize& a, Visit& visit) {
  visit.Input(a.x, a.size);
  visit.Scratch(a.scratch, ScratchOf(a));
  visit.Output(a.basis, a.size);
}

template <typename Run>
void ForEachCallOfLowRank(Inputs& in, bool independent_of_blocks, Run&& run) {
  if (!independent_of_blocks) return;
  // As many of these tensors as there is room for, again and again; more than a launch
  // on a GPU takes.
  constexpr int64_t kShapes[][2] = {{2, 3},    {1, 0},    {65, 64},  {3, 0},
                                    {1, 5},    {7, 1},    {64, 129}, {33, 0},
                                    {9, 1100}, {200, 40}, {2500, 2}};
  std::vector<int64_t> rows, columns, heights;
  int64_t left = in.size;
  const auto add = [&](int64_t n, int64_t m) {
    rows.push_back(n);
    columns.push_back(m);
    if (m != 0) heights.push_back(n);
    left -= m == 0 ? n : n * m;
  };
  for (int turn = 0; turn < 10; ++turn) {
    for (const auto& [n, m] : kShapes) {
      if ((m == 0 ? n : n * m) <= left) add(n, m);
    }
  }
  if (left >= 700) add(left / 700, 700);
  add(left, 0);
  const int64_t tensors = static_cast<int64_t>(rows.size());
  for (int64_t rank : {1, 2, 3, 4, 9}) {
    MultiplyMatrices multiply{in.wild.data(), in.size, rows.data(), columns.data(),
                              tensors,        {},      rank,        {}};
    const MatrixTensor sizes = SizesOf(multiply);
    const Array<float> right = in.Floats(sizes.right), of_left = in.Floats(sizes.left),
                       values = in.Floats(sizes.value);
    multiply.right = right.data();
    const std::string of_rank = With("rank", rank);
    run("MultiplyMatrices" + of_rank, multiply);
    run("MultiplyTransposed" + of_rank, MultiplyTransposed{in.wild.data(),
                                                           in.size,
                                                           rows.data(),
                                                           columns.data(),
                                                           tensors,
                                                           of_left.data(),
                                                           rank,
                                                           {},
                                                           {}});
    run("MultiplyFactors" + of_rank, MultiplyFactors{of_left.data(),
                                                     values.data(),
                                                     in.size,
                                                     rows.data(),
                                                     columns.data(),
                                                     tensors,
                                                     rank,
                                                     {}});
    run("Orthonormalize" + of_rank, Orthonormalize{of_left.data(),
                                                   sizes.left,
                                                   heights.data(),
                                                   static_cast<int64_t>(heights.size()),
                                                   rank,
                                                   {},
                                                   {}});
  }
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LOW_RANK_H_
