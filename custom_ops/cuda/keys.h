// The numbers of a block while its levels are found: keys for comparisons, and integers
// for sums, whose order then does not matter.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_KEYS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_KEYS_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

// All bits, or none, as the highest one.
__device__ inline uint32_t SignBits(uint32_t bits) {
  return static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
}

// Keys: integers in the order of the numbers. Both zeros have the same key.
__device__ inline uint32_t KeyOf(float x) {
  const uint32_t bits = IsZero(x) ? 0 : BitsOf(x);
  return bits ^ (SignBits(bits) | 0x80000000);
}

__device__ inline float NumberOf(uint32_t key) {
  return __uint_as_float(key ^ (~SignBits(key) | 0x80000000));
}

__device__ inline int ExponentOf(float x) { return BitsOf(x) >> 23 & 0xFF; }

constexpr int kInfinite = 255;  // The exponent of infinity and NaN.

// The integer q that stands for a number in the sums of a block whose smallest and
// largest keys are given.
class FixedPoint {
 public:
  FixedPoint() = default;

  __device__ FixedPoint(uint32_t smallest, uint32_t largest)
      : exponent(
            Larger()(ExponentOf(NumberOf(smallest)), ExponentOf(NumberOf(largest)))) {
    // The scale, 2^(156 - exponent), is no float32, but its two factors are.
    const int power = 156 - exponent;
    scale_ = __uint_as_float((127 + power / 2) << 23);
    other_scale_ = __uint_as_float((127 + power - power / 2) << 23);
  }

  __device__ int operator()(uint32_t key) const {
    const float x = NumberOf(key);
    if (ExponentOf(x) == 0) return 0;
    return __float2int_rn(__fmul_rn(__fmul_rn(x, scale_), other_scale_));
  }

  // The mean of `number` numbers with the sum `sum`.
  __device__ float Mean(int64_t sum, int64_t number) const {
    const double wide =
        ldexp(static_cast<double>(sum) / static_cast<double>(number), exponent - 156);
    return fabs(wide) < 0x1p-126 ? 0 : static_cast<float>(wide);
  }

  int exponent;  // Of the largest magnitude.

 private:
  float scale_, other_scale_;
};

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_KEYS_H_
