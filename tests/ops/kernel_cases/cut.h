// Vectors that are cut into parts.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CUT_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CUT_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../../custom_ops/kernels.h"
#include "array.h"

namespace tfgradcomp_cases {

// The parts of a vector, each in memory of its own. They end inside groups, words and
// chunks and at the ends of these. Several parts lie in one group, and some are empty.
class Cut {
 public:
  // Each `turn` gives another cut.
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
struct HasCutX<Kernel, decltype(static_cast<void>(std::declval<Kernel>().x.whole))>
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

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_CUT_H_
