// Buffers and calls of the kernels for codes and their words.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CODES_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CODES_H_

#include <cstdint>
#include <string>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/word_format.h"
#include "inputs.h"

namespace tfgradcomp_cases {

template <typename Visit>
void VisitBuffers(PackCodes& a, Visit& visit) {
  visit.Input(a.codes, a.size);
  visit.Output(a.words, WordsFor(a.size, a.base));
}

template <typename Visit>
void VisitBuffers(UnpackCodes& a, Visit& visit) {
  visit.Input(a.words, a.rows * WordsFor(a.size, a.base));
  visit.Output(a.codes, a.rows * a.size);
}

template <typename Visit>
void VisitBuffers(PackTernary& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.limit, a.num_blocks);
  visit.Input(a.scale, a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Input(a.stream, 3);
  visit.Output(a.words, WordsFor(a.size, 3));
}

template <typename Visit>
void VisitBuffers(SumCodes& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * WordsFor(a.size, a.base));
  visit.Output(a.sum, WordsFor(a.size, a.sum_base));
}

template <typename Visit>
void VisitBuffers(SumLevels& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * WordsFor(a.size, a.base));
  visit.Input(a.scale, a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.values.whole, a.size);
}

template <typename Visit>
void VisitBuffers(AddScaled& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.y, a.size);
  visit.Input(a.factor, 1);
  visit.Output(a.total, a.size);
}

template <typename Visit>
void VisitBuffers(RoundToBfloat16& a, Visit& visit) {
  visit.Input(a.x, a.size);
  visit.Input(a.stream, 3);
  visit.Output(a.rounded, a.size);
}

template <typename Run>
void ForEachCallOfCodes(Inputs& in, bool independent_of_blocks, Run&& run) {
  const int64_t n = in.size;
  const int64_t workers = in.num_workers;
  const int64_t blocks = in.num_blocks;
  const int64_t* const splits = in.row_splits.data();
  const uint64_t* const streams[] = {nullptr, in.stream.data()};

  run("PackTernary", PackTernary{in.wild.data(),
                                 n,
                                 in.limit.data(),
                                 in.wild_scale.data(),
                                 splits,
                                 blocks,
                                 streams[1],
                                 {}});
  for (uint64_t base : {2, 3, 5, 9, 17, 256, 257, 65537}) {
    const Array<uint32_t> words = in.Words(base);
    const int64_t zero = workers * static_cast<int64_t>(base - 1);
    run("SumLevels" + With("base", base), SumLevels{words.data(),
                                                    workers,
                                                    n,
                                                    base,
                                                    2,
                                                    zero,
                                                    in.wild_scale.data(),
                                                    splits,
                                                    blocks,
                                                    {}});
  }

  if (!independent_of_blocks) return;
  run("AddScaled", AddScaled{in.wild.data(), n, in.x.data(), in.ratio.data(), {}});
  run("RoundToBfloat16", RoundToBfloat16{in.wild.data(), n, streams[1], {}});
  for (uint64_t base : {uint64_t{2}, uint64_t{3}, uint64_t{4}, uint64_t{5}, uint64_t{9},
                        uint64_t{17}, uint64_t{256}, uint64_t{257}, uint64_t{65536},
                        uint64_t{65537}, (uint64_t{1} << 32) - 1, uint64_t{1} << 32}) {
    const std::string of_base = With("base", base);
    const Array<int32_t> codes = in.Codes(base);
    const Array<uint32_t> words = in.Words(base);
    run("PackCodes" + of_base, PackCodes{codes.data(), n, base, {}});
    run("UnpackCodes" + of_base, UnpackCodes{words.data(), workers, n, base, {}});
    const uint64_t sum_base = workers * (base - 1) + 1;
    if (sum_base > uint64_t{1} << 32) continue;
    run("SumCodes" + of_base, SumCodes{words.data(), workers, n, base, sum_base, {}});
    run("SumCodes" + of_base + " of one",
        SumCodes{words.data(), 1, n, base, sum_base, {}});
  }
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CODES_H_
