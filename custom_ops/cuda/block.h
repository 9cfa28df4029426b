// Reductions over the threads of a thread block, which synchronize before and after.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

constexpr int kManyThreads = 1024;

// Combines the values of all threads.
template <typename T, typename Combine>
__device__ T CombineThreads(T value, Combine combine) {
  __shared__ T parts[kWarp];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (Lane() == 0) parts[WarpInBlock()] = value;
  __syncthreads();
  const int warps = blockDim.x / kWarp;
  value = parts[Lane() % warps];
  for (int distance = warps / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  __syncthreads();
  return value;
}

// The sum of the values of the threads before this one.
__device__ inline int64_t SumBefore(int64_t value) {
  __shared__ int64_t parts[kWarp];
  int64_t sum = value;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, sum, distance);
    if (Lane() >= distance) sum += other;
  }
  if (Lane() == kWarp - 1) parts[WarpInBlock()] = sum;
  __syncthreads();
  for (int warp = 0; warp < WarpInBlock(); ++warp) sum += parts[warp];
  __syncthreads();
  return sum - value;
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_H_
