// The tensors of a vector of matrices, in launches, and sums of their products.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_TENSORS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_TENSORS_H_

#include "../matrices.h"
#include "block.h"

namespace tfgradcomp {
namespace {

// The tensors of a launch, each cut into tiles. A kernel takes them as an argument, so
// that no memory has to be copied to the GPU; an argument has less than 4096 bytes.
struct Tensors {
  static constexpr int kMost = 56;
  MatrixTensor tensors[kMost];
  int64_t tiles[kMost + 1];  // Those before each tensor.
  int count;

  __device__ int Of(int64_t tile) const {
    return static_cast<int>(BlockOf(tiles, 0, count - 1, tile));
  }
};

// Launches a kernel for the tensors, kMost at a time, by launch(tensors, tiles).
// tiles_of(tensor) is the number of its tiles.
template <typename Args, typename TilesOf, typename LaunchKernel>
const char* LaunchTensors(const Args& args, const TilesOf& tiles_of,
                          const LaunchKernel& launch) {
  const char* error = nullptr;
  Tensors some = {};
  EachTensor(args.rows, args.columns, args.num_tensors, args.rank,
             [&](const MatrixTensor& tensor, int64_t i) {
               if (error != nullptr) return;
               const int64_t tiles = tiles_of(tensor);
               if (tiles > 0) {
                 some.tensors[some.count] = tensor;
                 some.tiles[some.count + 1] = some.tiles[some.count] + tiles;
                 ++some.count;
               }
               const bool is_last = i + 1 == args.num_tensors;
               if (some.count == 0) return;
               if (some.count < Tensors::kMost && !is_last) return;
               error = launch(some, some.tiles[some.count]);
               some.count = 0;
             });
  return error;
}

// Half a warp has the lanes of a sum.
static_assert(kWarp == 2 * kLanesOfSum, "");

template <typename T>
__device__ T AddLanes(T sum) {
  for (int half = kLanesOfSum / 2; half > 0; half /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, half);
  }
  return sum;
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_TENSORS_H_
