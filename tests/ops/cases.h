// Test cases for the kernels, and the comparison of two devices that run them.
//
// A device is anything that can be called with a struct of kernels.h whose pointers are
// to host memory, and that has filled the outputs when it returns:
//
//   struct Device {
//     template <typename Kernel> void operator()(const Kernel& args);
//   };
//
//   Comparison<DeviceA, DeviceB> comparison(a, b);
//   for (const Shape& shape : Shapes(most)) comparison.Run(shape);
//   puts(comparison.report().c_str());
//
// Buffers are exactly as long as kernels.h says and aligned to their element only, so
// that sanitizers see what lies beyond, and aligned accesses where none is promised.

#ifndef TFGRADCOMP_TESTS_OPS_CASES_H_
#define TFGRADCOMP_TESTS_OPS_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../custom_ops/kernels.h"
#include "../../custom_ops/word_format.h"

namespace tfgradcomp_cases {

using namespace tfgradcomp;  // NOLINT: the kernels are the subject here.
using tfgradcomp_format::SlotsFor;
using tfgradcomp_format::SparseScratch;
using tfgradcomp_format::WordsFor;

// -- Buffers ----------------------------------------------------------------------

// An array of `count` elements that begins one element after an aligned address.
template <typename T>
class Array {
 public:
  explicit Array(int64_t count = 0) : memory_(new T[count + 1]()), count_(count) {}

  T* data() { return memory_.get() + 1; }
  const T* data() const { return memory_.get() + 1; }
  int64_t count() const { return count_; }
  T& operator[](int64_t i) { return data()[i]; }

 private:
  std::unique_ptr<T[]> memory_;
  int64_t count_;
};

// Calls visit.Input(pointer, count) for each array that a kernel reads, .Scratch and
// .Output for those that it writes, .Some for one of which a kernel writes as many as
// another one says. Pointers are given as the struct's own fields.
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
void VisitBuffers(PackTernary& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.limit, a.num_blocks);
  visit.Input(a.scale, a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Input(a.stream, 3);
  visit.Output(a.words, WordsFor(a.size, 3));
}

template <typename Visit>
void VisitBuffers(BlockStatistics& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Scratch(a.scratch, 5 * SlotsFor(a.size, a.num_blocks));
  visit.Output(a.statistics, 5 * a.num_blocks);
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
void VisitBuffers(MeanOfSigns& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * WordsFor(a.size, 2));
  visit.Input(a.scale, a.num_workers * a.num_blocks);
  visit.Input(a.row_splits, a.num_blocks + 1);
  visit.Output(a.values.whole, a.size);
}

template <typename Visit>
void VisitBuffers(FindLevels& a, Visit& visit) {
  visit.Input(a.x.whole, a.size);
  visit.Input(a.row_splits, a.num_blocks + 1);
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

template <typename Visit>
void VisitBuffers(MajorityVote& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * WordsFor(a.size, a.base));
  if (a.stream != nullptr) visit.Input(a.stream, 3);
  visit.Output(a.votes, WordsFor(a.size, a.reply_base));
}

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

// -- Cut vectors ------------------------------------------------------------------

// The parts of a vector, each in memory of its own. Their ends lie inside and on those
// of groups, words and chunks; several of them lie in one, and some are empty.
class Cut {
 public:
  // Another `turn`, another cut.
  explicit Cut(int64_t size, int turn = 0) {
    constexpr int64_t kSizes[] = {0, 1, 31, 33, 20, 7, 0, 64, 512, 3, 700, 1, 1, 2000};
    for (int64_t i = size + turn; splits_.back() < size; ++i) {
      Add(std::min(kSizes[i % (sizeof(kSizes) / sizeof(*kSizes))],
                   size - splits_.back()));
    }
    Add(0);
  }

  template <typename T>
  void Set(CutVector<T>* vector) const {
    vector->whole = nullptr;
    vector->parts = parts_.data();
    vector->splits = splits_.data();
    vector->num_parts = static_cast<int64_t>(parts_.size());
  }

  void CopyFrom(const float* whole) {
    EachPart([&](float* part, int64_t begin, int64_t count) {
      std::copy_n(whole + begin, count, part);
    });
  }

  void CopyTo(float* whole) {
    EachPart([&](float* part, int64_t begin, int64_t count) {
      std::copy_n(part, count, whole + begin);
    });
  }

 private:
  void Add(int64_t size) {
    arrays_.emplace_back(size);
    parts_.push_back(arrays_.back().data());
    splits_.push_back(splits_.back() + size);
  }

  template <typename Body>
  void EachPart(const Body& body) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      body(parts_[i], splits_[i], splits_[i + 1] - splits_[i]);
    }
  }

  std::vector<Array<float>> arrays_;
  std::vector<float*> parts_;
  std::vector<int64_t> splits_ = {0};
};

template <typename Kernel, typename = void>
struct HasCutX : std::false_type {};
template <typename Kernel>
struct HasCutX<Kernel, decltype(static_cast<void>(std::declval<Kernel>().x))>
    : std::true_type {};
template <typename Kernel, typename = void>
struct HasMoments : std::false_type {};
template <typename Kernel>
struct HasMoments<Kernel, decltype(static_cast<void>(std::declval<Kernel>().moments))>
    : std::true_type {};
template <typename Kernel, typename = void>
struct HasCutValues : std::false_type {};
template <typename Kernel>
struct HasCutValues<Kernel, decltype(static_cast<void>(std::declval<Kernel>().values))>
    : std::true_type {};

// Calls run(args) with the vectors that may be cut in parts.
template <typename Kernel, typename Run>
void RunCut(const Kernel& args, const Run& run) {
  Kernel copy = args;
  Cut cut(args.size), moments(args.size, 5);
  if constexpr (HasCutX<Kernel>::value) {
    cut.CopyFrom(args.x.whole);
    cut.Set(&copy.x);
  }
  if constexpr (HasMoments<Kernel>::value) {
    if (args.moments.whole != nullptr) {
      moments.CopyFrom(args.moments.whole);
      moments.Set(&copy.moments);
    }
  }
  if constexpr (HasCutValues<Kernel>::value) cut.Set(&copy.values);
  run(copy);
  if constexpr (HasCutValues<Kernel>::value) cut.CopyTo(args.values.whole);
}

// -- Inputs -----------------------------------------------------------------------

enum class Layout { kOneBlock, kRagged, kBlocksOfOne, kBuckets };
constexpr Layout kLayouts[] = {Layout::kOneBlock, Layout::kRagged, Layout::kBlocksOfOne,
                               Layout::kBuckets};
constexpr const char* kLayoutNames[] = {"one block", "ragged", "blocks of one",
                                        "buckets"};

struct Shape {
  int64_t size;
  Layout layout;
  int64_t num_workers;
};

// All shapes of at most `most` elements. From 131072 elements on, a block's chunks are
// more than one warp of a GPU adds up.
inline std::vector<Shape> Shapes(int64_t most) {
  std::vector<Shape> shapes;
  for (int64_t size : {0,  1,  2,  3,   19,  20,  21,   31,   32,     33,
                       63, 64, 65, 511, 512, 513, 1000, 9001, 150001, (1 << 20) + 7}) {
    if (size > most) break;
    for (Layout layout : kLayouts) {
      if (size > 1000 && layout == Layout::kBlocksOfOne) continue;  // Slow to emulate.
      for (int64_t num_workers : {1, 2, 3, 4, 8}) {
        if (size > 10000 && num_workers != 2 && num_workers != 3) continue;
        shapes.push_back({size, layout, num_workers});
      }
    }
  }
  return shapes;
}

// The inputs of all kernels, of one shape; the same on every machine.
class Inputs {
 public:
  // With `nonfinite`, some numbers are infinite or NaN. Only where the sign of a NaN is
  // the same on all processors: one that they make themselves has no certain sign.
  Inputs(const Shape& shape, uint64_t seed, bool nonfinite)
      : size(shape.size), num_workers(shape.num_workers), state_(seed) {
    std::vector<int64_t> splits = {0};
    while (splits.back() < size) {
      int64_t width = size;
      if (shape.layout == Layout::kRagged) width = int64_t{1} + Below(1 << Below(13));
      if (shape.layout == Layout::kBlocksOfOne) width = 1;
      if (shape.layout == Layout::kBuckets) width = 2048;
      splits.push_back(std::min(splits.back() + width, size));
    }
    num_blocks = static_cast<int64_t>(splits.size()) - 1;
    row_splits = Array<int64_t>(num_blocks + 1);
    for (int64_t b = 0; b <= num_blocks; ++b) row_splits[b] = splits[b];

    const float infinity = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    x = Numbers(size);
    momentum = Numbers(size);
    residual = Numbers(size);
    moments = Magnitudes(size);
    variance = Magnitudes(size);
    for (int64_t j = 0; j < size; ++j) {
      moments[j] *= residual[j] * residual[j];
      variance[j] *= Below(3) == 0 ? 0.01f : residual[j] * residual[j];
    }
    if (nonfinite) Put(variance, {infinity, nan});
    if (nonfinite) Put(x, {infinity, -infinity, nan});
    wild = Numbers(size);
    if (nonfinite) Put(wild, {infinity, -infinity, nan, -nan});
    coarse = Array<float>(size);
    for (int64_t j = 0; j < size; ++j) coarse[j] = std::round(residual[j]);
    scale = Magnitudes(num_workers * num_blocks);
    wild_scale = Magnitudes(num_workers * num_blocks);
    if (nonfinite) Put(wild_scale, {infinity, nan, 0.0f});
    limit = Magnitudes(num_blocks);
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (Below(2) == 0) limit[b] = infinity;
    }
    ratio[0] = 0.75f;
    yes[0] = true;
    for (int i = 0; i < 3; ++i) stream[i] = uint64_t{Next()} << 32 | Next();
  }

  // Codes below the base.
  Array<int32_t> Codes(uint64_t base) {
    Array<int32_t> codes(size);
    for (int64_t j = 0; j < size; ++j) codes[j] = static_cast<int32_t>(Code(base));
    return codes;
  }

  // Words of a vector a worker.
  Array<uint32_t> Words(uint64_t base) {
    const int64_t words = WordsFor(size, base);
    const int64_t digits = tfgradcomp_format::DigitsPerWord(base);
    Array<uint32_t> packed(num_workers * words);
    for (int64_t worker = 0; worker < num_workers; ++worker) {
      for (int64_t word = 0; word < words; ++word) {
        uint64_t value = 0;
        for (int64_t j = std::min((word + 1) * digits, size); j > word * digits; --j) {
          value = value * base + Code(base);
        }
        packed[worker * words + word] = static_cast<uint32_t>(value);
      }
    }
    return packed;
  }

  // `count` levels a block of each worker, in ascending order; of some blocks all
  // equal.
  Array<float> Levels(int64_t count) {
    Array<float> levels = Numbers(num_workers * num_blocks * count);
    for (int64_t first = 0; first < levels.count(); first += count) {
      std::sort(levels.data() + first, levels.data() + first + count);
      if (Below(8) == 0) std::fill_n(levels.data() + first, count, levels[first]);
    }
    return levels;
  }

  // Sparse words, in `row` a worker, of about a share of the elements; rows are filled
  // up with what stands for nothing.
  Array<uint32_t> SparseWords(uint32_t one_in, int64_t* row) {
    std::vector<std::vector<uint32_t>> words(num_workers);
    *row = 0;
    for (std::vector<uint32_t>& one : words) {
      for (int64_t j = 0; j < size; ++j) {
        if (Below(one_in) == 0) one.push_back((Next() & 0xF0000000) | j);
      }
      *row = std::max(*row, static_cast<int64_t>(one.size()) + Below(3));
    }
    Array<uint32_t> all(num_workers * *row);
    for (int64_t i = 0; i < all.count(); ++i) {
      const std::vector<uint32_t>& one = words[i / *row];
      const size_t at = i % *row;
      all[i] = at < one.size() ? one[at] : tfgradcomp_format::kNothing;
    }
    return all;
  }

  int64_t size, num_workers, num_blocks;
  Array<int64_t> row_splits;
  Array<float> x, momentum, residual;  // [size]
  Array<float> moments, variance;      // [size], around the squares of residual
  Array<float> wild;                   // [size], with NaN of either sign
  Array<float> coarse;                 // [size], many of them equal
  Array<float> scale, wild_scale;      // [num_workers, num_blocks]
  Array<float> limit;                  // [num_blocks]
  Array<float> ratio{1};
  Array<bool> yes{1}, no{1};
  Array<uint64_t> stream{3};

 private:
  uint32_t Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }

  uint32_t Below(uint32_t bound) {
    return static_cast<uint32_t>(uint64_t{Next()} * bound >> 32);
  }

  // The smallest and the largest codes are frequent: they make the extreme words.
  uint64_t Code(uint64_t base) {
    const uint32_t random = Next();
    if (random % 8 == 0) return base - 1;
    if (random % 8 == 1) return 0;
    return (uint64_t{Next()} * base) >> 32;
  }

  // Of many orders of magnitude, zeros and denormals among them.
  Array<float> Numbers(int64_t count) {
    Array<float> numbers(count);
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t kind = Below(16);
      uint32_t bits = Next() & 0x807FFFFF;
      if (kind == 0) bits &= 0x80000000;                   // Zero.
      if (kind > 1) bits |= (127 - 12 + Below(24)) << 23;  // Else denormal.
      std::memcpy(&numbers[j], &bits, sizeof(bits));
    }
    return numbers;
  }

  Array<float> Magnitudes(int64_t count) {
    Array<float> numbers = Numbers(count);
    for (int64_t j = 0; j < count; ++j) numbers[j] = std::fabs(numbers[j]);
    return numbers;
  }

  void Put(Array<float>& numbers, std::initializer_list<float> special) {
    for (float value : special) {
      if (numbers.count() > 0) {
        numbers[Below(static_cast<uint32_t>(numbers.count()))] = value;
      }
    }
  }

  uint64_t state_;
};

// Calls run(name, args) for every kernel and every way to call it. The struct's name
// comes first in `name`, then what tells its calls apart.
template <typename Run>
void ForEachCall(Inputs& in, bool independent_of_blocks, Run&& run) {
  const auto with = [](const char* key, uint64_t value) {
    return std::string(" ") + key + "=" + std::to_string(value);
  };
  const int64_t n = in.size, workers = in.num_workers, blocks = in.num_blocks;
  const int64_t* splits = in.row_splits.data();
  const uint64_t* const streams[] = {nullptr, in.stream.data()};
  const bool* const flags[] = {in.no.data(), in.yes.data()};

  run("PackTernary", PackTernary{in.wild.data(),
                                 n,
                                 in.limit.data(),
                                 in.wild_scale.data(),
                                 splits,
                                 blocks,
                                 streams[1],
                                 {}});
  run("BlockStatistics", BlockStatistics{in.wild.data(), n, splits, blocks, {}, {}});
  // Finite ones as well: only their sums show the order.
  run("BlockStatistics finite",
      BlockStatistics{in.residual.data(), n, splits, blocks, {}, {}});
  const Array<uint32_t> signs = in.Words(2);
  run("MeanOfSigns",
      MeanOfSigns{signs.data(), in.wild_scale.data(), workers, n, splits, blocks, {}});
  for (const bool* moving : flags) {
    const std::string moves = with("moving", *moving);
    for (const float* momentum : {static_cast<const float*>(nullptr),
                                  static_cast<const float*>(in.momentum.data())}) {
      run("SignErrorFeedback" + moves + with("momentum", momentum != nullptr),
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
    // Any words will do: here those that a worker sent.
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
  for (uint64_t base : {2, 3, 5, 9, 17, 256, 257, 65537}) {
    const Array<uint32_t> words = in.Words(base);
    const int64_t zero = workers * static_cast<int64_t>(base - 1);
    run("SumLevels" + with("base", base), SumLevels{words.data(),
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
  const struct {
    const char* name;
    LevelRule rule;
    int64_t count, sweeps;
  } rules[] = {{"optimal", LevelRule::kOptimal, 9, 0},
               {"optimal", LevelRule::kOptimal, 3, 2},
               {"quantiles", LevelRule::kQuantiles, 7, 0},
               {"symmetric", LevelRule::kSymmetric, 2, 0},
               {"means", LevelRule::kMeans, 3, 0}};
  // Not for each number of workers, nor for many blocks of one: slow to emulate.
  const Array<float>& vector = workers == 2 ? in.coarse : in.wild;
  for (const auto& [name, rule, count, sweeps] : rules) {
    if (workers == 1 || workers > 4 || (n > 100 && blocks == n)) break;
    run("FindLevels " + std::string(name) + with("count", count) +
            with("sweeps", sweeps),
        FindLevels{vector.data(), n, rule, count, sweeps, splits, blocks, {}, {}});
  }
  for (int64_t count : {2, 3, 9, 16, 17, 40}) {
    const Array<float> levels = in.Levels(count);
    const Array<uint32_t> words = in.Words(count);
    for (const uint64_t* stream : streams) {
      if (stream == nullptr && count == 2) continue;  // There is no base 1.
      run("PackLevels" + with("count", count) + with("stream", stream != nullptr),
          PackLevels{
              in.wild.data(), n, levels.data(), count, splits, blocks, stream, {}});
    }
    run("MeanOfLevels" + with("count", count),
        MeanOfLevels{
            words.data(), levels.data(), workers, n, count, splits, blocks, {}});
  }
  for (float alpha : {1.5f, 1e-30f, 1e30f}) {
    run("PackUnambiguous" + with("alpha < 1", alpha < 1) + with("> 2", alpha > 2),
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
    run("MeanOfSparse" + with("one in", one_in),
        MeanOfSparse{
            words.data(), row, in.scale.data(), workers, n, splits, blocks, {}});
  }
  if (!independent_of_blocks) return;

  for (uint64_t base : {uint64_t{2}, uint64_t{3}, uint64_t{4}, uint64_t{5}, uint64_t{9},
                        uint64_t{17}, uint64_t{256}, uint64_t{257}, uint64_t{65536},
                        uint64_t{65537}, (uint64_t{1} << 32) - 1, uint64_t{1} << 32}) {
    const std::string of_base = with("base", base);
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
  for (const uint64_t* stream : streams) {
    const std::string drawn = with("stream", stream != nullptr);
    run("PackSigns" + drawn, PackSigns{in.wild.data(), n, stream, {}, {}});
    for (const bool* warming_up : flags) {
      run("PackMomentumSigns" + drawn + with("warming_up", *warming_up),
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
    for (int64_t base : {2, 3}) {
      const Array<uint32_t> words = in.Words(base);
      for (int64_t reply_base : {2, 3}) {
        for (int64_t quorum : {0, 2}) {
          run("MajorityVote" + drawn + with("base", base) +
                  with("reply_base", reply_base) + with("quorum", quorum),
              MajorityVote{
                  words.data(), workers, n, base, reply_base, quorum, stream, {}});
        }
      }
    }
  }
  for (const float* variance : {static_cast<const float*>(nullptr),
                                static_cast<const float*>(in.variance.data())}) {
    for (float threshold : {0.25f, 1e-6f}) {
      CutVector<const float> moments;
      if (variance != nullptr) moments = in.moments.data();
      run("PackOverThreshold" + with("variance", variance != nullptr) +
              with("large", threshold > 0.1f),
          PackOverThreshold{in.x.data(),
                            moments,
                            in.residual.data(),
                            variance,
                            n,
                            threshold,
                            1.5f,
                            0.999f,
                            {},
                            {},
                            {},
                            {},
                            {},
                            {}});
    }
  }
  const Array<float> zeros(n);
  run("PackSigns zeros", PackSigns{zeros.data(), n, streams[1], {}, {}});
}

// -- Comparison -------------------------------------------------------------------

// Gives a kernel outputs and scratch of its own.
class OwnOutputs {
 public:
  // Filled with a pattern that no kernel writes everywhere.
  explicit OwnOutputs(unsigned char pattern) : pattern_(pattern) {}

  template <typename T>
  void Input(const T*&, int64_t) {}

  template <typename T>
  void Scratch(T*& field, int64_t count) {
    auto array = std::make_shared<Array<T>>(count);
    field = array->data();
    std::memset(static_cast<void*>(field), pattern_, count * sizeof(T));
    owned_.push_back(std::move(array));
  }

  template <typename T>
  void Output(T*& field, int64_t count) {
    Scratch(field, count);
  }
  template <typename T>
  void Some(T*& field, int64_t most, const int64_t*) {
    Scratch(field, most);
  }

 private:
  unsigned char pattern_;
  std::vector<std::shared_ptr<void>> owned_;
};

// Lists a kernel's outputs.
class ListOutputs {
 public:
  struct Item {
    const void* data;
    int64_t count;
    enum { kWord, kCount, kFloat, kDouble, kByte } type;
  };

  template <typename T>
  void Input(const T*&, int64_t) {}
  template <typename T>
  void Scratch(T*&, int64_t) {}
  template <typename T>
  void Output(T*& field, int64_t count) {
    items.push_back({field, count,
                     std::is_same<T, double>::value    ? Item::kDouble
                     : std::is_same<T, float>::value   ? Item::kFloat
                     : std::is_same<T, int64_t>::value ? Item::kCount
                     : std::is_same<T, int8_t>::value  ? Item::kByte
                                                       : Item::kWord});
  }
  template <typename T>
  void Some(T*& field, int64_t, const int64_t* count) {
    Output(field, *count);
  }

  std::vector<Item> items;
};

// The first element in which two arrays differ, or -1. A NaN equals any NaN: which one
// arithmetic gives depends on the processor.
template <typename T>
int64_t FirstDifference(const void* first, const void* second, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, static_cast<const char*>(first) + i * sizeof(T), sizeof(T));
    std::memcpy(&b, static_cast<const char*>(second) + i * sizeof(T), sizeof(T));
    if (std::memcmp(&a, &b, sizeof(T)) != 0 && !(a != a && b != b)) return i;
  }
  return -1;
}

template <typename First, typename Second>
class Comparison {
 public:
  Comparison(First& first, Second& second) : first_(first), second_(second) {}

  // Runs all calls of a shape on both devices. For odd numbers of workers some inputs
  // are not finite.
  void Run(const Shape& shape) {
    Inputs inputs(shape, 1 + shape.size + shape.num_workers,
                  shape.num_workers % 2 != 0);
    ForEachCall(
        inputs, shape.layout == Layout::kOneBlock,
        [&](const std::string& name, const auto& args) { Compare(name, shape, args); });
  }

  int64_t calls() const { return calls_; }
  int64_t differences() const { return differences_; }

  // One line for each of the first differences.
  const std::string& report() const { return report_; }

 private:
  template <typename Kernel>
  void Compare(const std::string& name, const Shape& shape, const Kernel& args) {
    Kernel first = args, second = args;
    OwnOutputs first_outputs(0xA5), second_outputs(0x5A);
    VisitBuffers(first, first_outputs);
    VisitBuffers(second, second_outputs);
    first_(first);
    second_(second);
    ++calls_;
    ListOutputs a, b;
    VisitBuffers(first, a);
    VisitBuffers(second, b);
    for (size_t i = 0; i < a.items.size(); ++i) {
      const ListOutputs::Item &x = a.items[i], &y = b.items[i];
      if (x.count != y.count) break;  // As many as a count says, which differs.
      const int64_t at = x.type == ListOutputs::Item::kDouble
                             ? FirstDifference<double>(x.data, y.data, x.count)
                         : x.type == ListOutputs::Item::kFloat
                             ? FirstDifference<float>(x.data, y.data, x.count)
                         : x.type == ListOutputs::Item::kCount
                             ? FirstDifference<int64_t>(x.data, y.data, x.count)
                         : x.type == ListOutputs::Item::kByte
                             ? FirstDifference<int8_t>(x.data, y.data, x.count)
                             : FirstDifference<uint32_t>(x.data, y.data, x.count);
      if (at < 0) continue;
      if (++differences_ > 50) continue;
      report_ += name + ", " + std::to_string(shape.size) + " elements, " +
                 kLayoutNames[static_cast<int>(shape.layout)] + ", " +
                 std::to_string(shape.num_workers) + " workers: output " +
                 std::to_string(i) + " differs at " + std::to_string(at) + " of " +
                 std::to_string(x.count) + "\n";
    }
  }

  First& first_;
  Second& second_;
  int64_t calls_ = 0, differences_ = 0;
  std::string report_;
};

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_CASES_H_
