// Flat vectors, whole or cut into parts, and updates of variables by them.

#ifndef TFGRADCOMP_CUSTOM_OPS_VECTORS_H_
#define TFGRADCOMP_CUSTOM_OPS_VECTORS_H_

#include <cstdint>

namespace tfgradcomp {

// A flat vector: either whole or, on the CPU only, cut into parts. Then `whole` is
// null, and part i holds the elements [splits[i], splits[i + 1]). A part may be empty.
// The CPU kernels multiply each element that they read by `scale`; the GPU kernels
// ignore it.
template <typename T>
struct CutVector {
  CutVector(T* vector = nullptr) : whole(vector) {}  // NOLINT: a pointer is one.

  T* whole;
  T* const* parts = nullptr;        // [num_parts]
  const int64_t* splits = nullptr;  // [num_parts + 1]
  int64_t num_parts = 0;
  float scale = 1;
};

// A step of an optimizer. A CPU kernel that decodes a vector of values u and is given
// an Update takes this step with u and writes no values. With coefficients c, each
// operation rounded:
//   kSgd:       w = w - u * c0
//   kMomentum:  m = m * c1 - u * c0,  w = w + m
//   kNesterov:  m = m * c1 - u * c0,  w = w + (m * c1 - u * c0)
//   kAdam:      m = m + (u - m) * c1,  v = v + (u * u - v) * c2,
//               w = w - (m * c0) / (sqrt(v) + c3)
//   kFrozenAdam: m = u,  w = w - (m * c0) / (max(f_i, sqrt(v)) + c1), where f_i is the
//               floor of part i; v stays
// Where part i has a decay d_i other than 0, w = w - (w * d_i) * rate comes before.
enum class UpdateRule { kSgd, kMomentum, kNesterov, kAdam, kFrozenAdam };
struct Update {
  UpdateRule rule;
  const float* coefficients;  // As many as the rule has.
  // All are cut in the same way. A rule may have no m or no v.
  CutVector<float> w, m, v;
  const float* decays = nullptr;  // [num_parts], or null: nothing decays.
  float rate = 0;
  const float* floors = nullptr;  // [num_parts], of kFrozenAdam.
};

// The kernel that takes the step of an update with a given vector, on a CPU only.
struct ApplyVector {
  CutVector<const float> x;
  int64_t size;
  const Update* update;
};

// The sums of BlockStatistics.
enum StatisticSums : int64_t { kSumL1 = 1, kSumSquares = 2, kSumPlain = 4 };

// For each block, in float64 and in the order of word_format.h: the maximum of |x| (of
// its bits, so a NaN is the largest), the sum of |x|, the sum of x^2, the sum of x, and
// the number of elements that are infinite or NaN. No result is -0. Of the three sums,
// those that nobody asks for are 0.
struct BlockStatistics {
  CutVector<const float> x;
  int64_t size;
  const int64_t* row_splits;
  int64_t num_blocks;
  int64_t sums;        // Of StatisticSums: those to compute.
  double* scratch;     // [5 * SlotsFor(size, num_blocks)]
  double* statistics;  // [5, num_blocks]
};

// The first part of x with an infinite element or NaN, or the number of parts if there
// is none; the same, unread, if x is known to be finite. On a CPU only.
struct FirstNonfinite {
  CutVector<const float> x;
  int64_t size;
  const bool* is_finite;
  int32_t* part;
};

// The indices of the `count` elements of largest magnitude, ascending; of equal ones
// the first. Magnitudes are compared by their bits, so a NaN is the largest. On a CPU
// only.
struct FindLargest {
  CutVector<const float> x;
  int64_t size;      // Less than 2^31.
  int64_t count;     // At most `size`.
  int32_t* indices;  // [count]
};

// x with zeros at some indices. On a CPU only.
struct ClearElements {
  const float* x;
  int64_t size;
  const int32_t* indices;  // [count], below `size`; those below 0 stand for nothing.
  int64_t count;
  float* cleared;  // [size]. It may be x.
};

// The mean of N workers' vectors, added in the order of workers. Few elements of each
// are given, by their indices; the others are 0. On a CPU only.
struct MeanOfPairs {
  const int32_t* indices;  // [num_workers, num_pairs], as above.
  const float* values;     // [num_workers, num_pairs]
  int64_t num_workers;
  int64_t num_pairs;
  int64_t size;
  float* mean;  // [size]
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_VECTORS_H_
