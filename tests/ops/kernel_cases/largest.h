// Buffers and calls of the kernels for the largest elements of chunks.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LARGEST_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LARGEST_H_

#include <cstdint>

#include "../../../custom_ops/chunks.h"
#include "../../../custom_ops/kernels.h"
#include "inputs.h"

namespace tfgradcomp_cases {

using tfgradcomp_format::ChunkFormat;

template <typename Visit>
void VisitBuffers(PackLargest& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.words, a.num_blocks * ChunkFormat(a).words);
  visit.Output(a.levels, a.num_blocks * ChunkFormat(a).levels);
  visit.Output(a.nonfinite, 1);
}

template <typename Visit>
void VisitBuffers(MeanOfLargest& a, Visit& visit) {
  const int64_t rows = a.num_workers * a.num_blocks;
  visit.Input(a.words, rows * ChunkFormat(a).words);
  visit.Input(a.levels, rows * ChunkFormat(a).levels);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.values.whole, a.size);
}

template <typename Run>
void ForEachCallOfLargest(Inputs& in, Run&& run) {
  const int64_t n = in.size;
  const int64_t workers = in.num_workers;
  const struct {
    int64_t k, chunk, bits;
  } formats[] = {{64, 4096, 2}, {1, 1, 1}, {5, 24, 3}, {7, 65536, 2}, {40, 40, 1}};
  // To save time in the emulator, no large vectors with chunks of few elements.
  for (const auto& [k, chunk, bits] : formats) {
    if ((n > 100 && in.num_blocks == n) || n > 100 * chunk) continue;
    Array<int64_t> splits = in.Chunks(chunk);
    const int64_t blocks = splits.count() - 1;
    for (const auto* vector : {&in.wild, &in.coarse}) {
      run("PackLargest" + With("k", k) + With("coarse", vector == &in.coarse),
          PackLargest{
              vector->data(), n, k, chunk, bits, splits.data(), blocks, {}, {}, {}});
    }
    const Array<uint32_t> words = in.LargestWords({k, chunk, bits}, splits);
    const Array<float> levels = in.Floats(workers * blocks << (bits - 1));
    run("MeanOfLargest" + With("k", k), MeanOfLargest{words.data(),
                                                      levels.data(),
                                                      workers,
                                                      n,
                                                      k,
                                                      chunk,
                                                      bits,
                                                      splits.data(),
                                                      blocks,
                                                      {}});
  }
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_LARGEST_H_
