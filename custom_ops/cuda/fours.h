// Four neighbouring elements of a lane: loads and stores of 16 bytes, and their block.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_FOURS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_FOURS_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

template <typename T>
__device__ inline bool IsAligned(const T* place) {
  return reinterpret_cast<uintptr_t>(place) % sizeof(Four<T>) == 0;
}

// The elements from e on, a multiple of 4. Arrays are aligned to their elements only;
// most of them happen to be aligned to four, and `aligned` tells whether this one is.
template <typename T>
__device__ inline Four<T> LoadFour(const T* array, int e, bool aligned) {
  if (aligned) return reinterpret_cast<const Four<T>*>(array)[e / 4];
  return {array[e], array[e + 1], array[e + 2], array[e + 3]};
}

// To an aligned array only. For another one, a loop that is not unrolled has to store
// the numbers: compilers give two ways with the same four stores one form, the slow
// one.
template <typename T>
__device__ inline void StoreFour(T* array, int e, const Four<T>& four) {
  reinterpret_cast<Four<T>*>(array)[e / 4] = four;
}

// The block of a lane's elements, which it visits in ascending order: it is searched
// where it changes only. A warp makes one for a tile, all of its lanes together.
class LaneBlock {
 public:
  // For the `count` elements from `begin` on. The functions count from there.
  __device__ LaneBlock(const int64_t* row_splits, int64_t num_blocks, int64_t begin,
                       int count)
      : blocks_(row_splits, num_blocks, begin, begin + count),
        row_splits_(row_splits),
        begin_(begin),
        count_(count) {}

  // Moves on to element e. Returns whether it is in another block than the last one.
  __device__ bool Move(int e) {
    if (e < end_) return false;
    index = Of(e);
    const int64_t end = row_splits_[index + 1] - begin_;
    end_ = end < count_ ? static_cast<int>(end) : count_;
    return true;
  }

  // Whether the four elements from e on are in the block.
  __device__ bool HasFour(int e) const { return e + 4 <= end_; }

  __device__ int64_t Of(int e) const { return blocks_.Of(begin_ + e); }

  int64_t index = 0;  // Of the last element moved to.

 private:
  const TileBlocks blocks_;
  const int64_t* row_splits_;
  int64_t begin_;
  int count_, end_ = 0;
};

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_FOURS_H_
