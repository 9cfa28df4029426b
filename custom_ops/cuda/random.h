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
