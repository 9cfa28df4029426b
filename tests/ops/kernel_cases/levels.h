// Buffers and calls of the kernels for levels.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LEVELS_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LEVELS_H_

#include <cstdint>
#include <string>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/word_format.h"
#include "inputs.h"

namespace tfgradcomp_cases {

template <typename Visit>
void VisitBuffers(FindLevels& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, tfgradcomp_format::LevelsScratch(a.size));
  visit.Output(a.levels, a.num_blocks * a.count);
  visit.Output(a.nonfinite, 1);
}

template <typename Visit>
void VisitBuffers(PackLevels& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.levels, a.num_blocks * a.count);
  visit.Input(a.row_splits, a.num_blocks + 1);
  if (a.stream != nullptr) visit.Input(a.stream, 3);
  visit.Output(a.words, WordsFor(a.size, a.count - (a.stream == nullptr)));
}

template <typename Visit>
void VisitBuffers(MeanOfLevels& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * WordsFor(a.size, a.count));
  visit.Input(a.levels, a.num_workers * a.num_blocks * a.count);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.values.whole, a.size);
}

template <typename Run>
void ForEachCallOfLevels(Inputs& in, Run&& run) {
  const int64_t n = in.size;
  const int64_t workers = in.num_workers;
  const int64_t blocks = in.num_blocks;
  const int64_t* const splits = in.row_splits.data();
  const uint64_t* const streams[] = {nullptr, in.stream.data()};

  const struct {
    const char* name;
    LevelRule rule;
    int64_t count, sweeps;
  } rules[] = {{"optimal", LevelRule::kOptimal, 9, 0},
               {"optimal", LevelRule::kOptimal, 3, 2},
               {"quantiles", LevelRule::kQuantiles, 7, 0},
               {"symmetric", LevelRule::kSymmetric, 2, 0},
               {"means", LevelRule::kMeans, 3, 0}};
  // To save time in the emulator, only some numbers of workers, and no large vectors
  // with blocks of one element.
  const Array<float>& vector = workers == 2 ? in.coarse : in.wild;
  for (const auto& [name, rule, count, sweeps] : rules) {
    if (workers == 1 || workers > 4 || (n > 100 && blocks == n)) break;
    run("FindLevels " + std::string(name) + With("count", count) +
            With("sweeps", sweeps),
        FindLevels{vector.data(), n, rule, count, sweeps, splits, blocks, {}, {}, {}});
  }
  for (int64_t count : {2, 3, 9, 16, 17, 40}) {
    const Array<float> levels = in.Levels(count);
    const Array<uint32_t> words = in.Words(count);
    for (const uint64_t* stream : streams) {
      if (stream == nullptr && count == 2) continue;  // There is no base 1.
      run("PackLevels" + With("count", count) + With("stream", stream != nullptr),
          PackLevels{
              in.wild.data(), n, levels.data(), count, splits, blocks, stream, {}});
    }
    run("MeanOfLevels" + With("count", count),
        MeanOfLevels{
            words.data(), levels.data(), workers, n, count, splits, blocks, {}});
  }
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LEVELS_H_
