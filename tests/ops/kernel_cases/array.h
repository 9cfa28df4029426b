// Arrays whose memory begins where no kernel may rely on alignment.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_ARRAY_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_ARRAY_H_

#include <cstdint>
#include <memory>

#include "../../../custom_ops/kernels.h"

namespace tfgradcomp_cases {

using namespace tfgradcomp;  // NOLINT: the kernels are the subject here.

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

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_ARRAY_H_
