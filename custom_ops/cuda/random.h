// The random numbers of word_format.h, drawn by warps.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_RANDOM_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_RANDOM_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

// Draws the upper bits of the elements [begin, begin + count), a byte each. `begin` is
// a multiple of 16. The warp must synchronize before it reads them.
__device__ inline void DrawUpper(RandomStream stream, int64_t begin, int count,
                                 uint32_t* upper) {
  for (int e = 16 * Lane(); e < count; e += 16 * kWarp) {
    uint32_t words[4];
    tfgradcomp_format::Philox(stream, stream.UpperBlock(begin + e), words);
    for (int i = 0; i < 4; ++i) upper[e / 4 + i] = words[i];
  }
}

// The uniform number of an element, whose upper bits are known.
__device__ inline float UniformOf(uint32_t upper, RandomStream stream,
                                  int64_t element) {
  uint32_t lower[4];
  tfgradcomp_format::Philox(stream, stream.LowerBlock(element), lower);
  const uint32_t pair = lower[element % 8 / 2];
  return tfgradcomp_format::Uniform(upper, pair >> (16 * (element % 2)) & 0xFFFF);
}

// A comparison, uniform * scale < value.
struct Comparison {
  float scale, value;

  __device__ bool Holds(float uniform) const {
    return __fmul_rn(uniform, scale) < value;
  }

  // By the upper bits alone. If they do not decide, the result is false for now.
  __device__ bool Holds(uint32_t upper, bool* undecided) const {
    const float least = tfgradcomp_format::Uniform(upper, 0);
    // Exact, without a second conversion.
    const float most = __fadd_rn(least, tfgradcomp_format::Uniform(0, 0xFFFF));
    const bool holds = Holds(least);
    *undecided = holds != Holds(most);
    return holds && !*undecided;
  }
};

// Comparisons of four elements, whose upper bits are in one word, with the same scale.
// Upper bits n stand for a uniform number from n / 2^8 to (n + 1) / 2^8, and decide if
// the value is further than scale / 2^15 outside of this range times scale: that is
// more than all roundings together. A scale near the ends of the range of float32,
// where roundings are larger, leaves all undecided; so does a value that is NaN.
class UpperComparison {
 public:
  __device__ explicit UpperComparison(float scale) {
    const float magnitude = fabsf(scale);
    const bool ordinary =
        magnitude == 0 || (magnitude >= 0x1p-100f && magnitude <= 0x1p100f);
    unit_ = ordinary ? __fmul_rn(scale, 0x1p-8f) : __uint_as_float(0x7FC00000);
    shift_ = __fmul_rn(unit_, 0x1p15f);
    least_ = __fmul_rn(fabsf(unit_), -0x1p-7f);
    most_ = __fmul_rn(fabsf(unit_), 1 + 0x1p-7f);
  }

  // Whether the comparison of element `i` of four holds. If that is undecided, the
  // result is false for now.
  __device__ bool Holds(uint32_t upper, int i, float value, bool* undecided) const {
    // 2^15 + n, without a conversion.
    const float shifted =
        __uint_as_float(__byte_perm(upper, 0x47000000, 0x7404 | i << 4));
    // value - n * unit
    const float rest = __fmaf_rn(-shifted, unit_, __fadd_rn(value, shift_));
    const bool holds = rest > most_;
    *undecided = !holds && !(rest <= least_);
    return holds;
  }

 private:
  float unit_, shift_, least_, most_;
};

// The undecided elements of a warp's tile, in shared memory. They wait until all of
// them are known, so that most lanes have one when the lower bits are drawn.
class Waiting {
 public:
  // The warp must synchronize before the first Add().
  __device__ void Clear() {
    if (Lane() == 0) count_ = 0;
  }

  // Adds element e, or calls decide(e) if there is no room.
  template <typename Decide>
  __device__ void Add(int e, const Decide& decide) {
    const uint32_t place = atomicAdd(&count_, 1u);
    if (place < kMost) {
      elements_[place] = static_cast<uint16_t>(e);
    } else {
      decide(e);
    }
  }

  // Calls decide(e) for all elements that wait. The warp must synchronize before and
  // after.
  template <typename Decide>
  __device__ void DecideAll(const Decide& decide) const {
    const int count = count_ < kMost ? count_ : kMost;
    for (int i = Lane(); i < count; i += kWarp) decide(elements_[i]);
  }

 private:
  static constexpr uint32_t kMost = 2 * kWarp;
  uint32_t count_;
  uint16_t elements_[kMost];
};

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_RANDOM_H_
