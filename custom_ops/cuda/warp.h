// Helpers of all kernels. One warp takes a tile of the flat vector at a time. Its
// thread block does not matter, so thread blocks need no barriers (but see block.h).

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_WARP_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_WARP_H_

#include <cuda_runtime.h>

#include "../word_format.h"
#include "cuda.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::BitsOf;
using tfgradcomp_format::IsZero;
using tfgradcomp_format::kChunk;
using tfgradcomp_format::RandomStream;
using tfgradcomp_format::SignCode;

constexpr int kWarp = 32, kWarpsPerBlock = 8, kThreads = kWarp * kWarpsPerBlock;
constexpr unsigned kAllLanes = 0xFFFFFFFF;

// Enough thread blocks to fill any GPU several times; for more tiles, warps loop.
// Checks set few thread blocks, so that warps loop over small vectors, too.
#ifndef TFGRADCOMP_MAX_THREAD_BLOCKS
#define TFGRADCOMP_MAX_THREAD_BLOCKS (1 << 14)
#endif
constexpr int64_t kMaxThreadBlocks = TFGRADCOMP_MAX_THREAD_BLOCKS;

TFGRADCOMP_HOST_DEVICE constexpr int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Launches `blocks` thread blocks, or as many as there may be. Returns null or CUDA's
// message.
template <typename... Parameters, typename... Arguments>
const char* LaunchBlocks(const Gpu& gpu, int64_t blocks, int threads,
                         void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (blocks <= 0) return nullptr;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks < kMaxThreadBlocks ? blocks : kMaxThreadBlocks);
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(gpu.stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Launches one warp a tile.
template <typename... Parameters, typename... Arguments>
const char* Launch(const Gpu& gpu, int64_t tiles, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  return LaunchBlocks(gpu, CeilDiv(tiles, kWarpsPerBlock), kThreads, kernel,
                      arguments...);
}

template <typename T>
const char* SetZero(const Gpu& gpu, T* numbers, int64_t count = 1) {
  const cudaError_t error = cudaMemsetAsync(numbers, 0, count * sizeof(T),
                                            static_cast<cudaStream_t>(gpu.stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

__device__ inline int Lane() { return threadIdx.x % kWarp; }
__device__ inline int WarpInBlock() { return threadIdx.x / kWarp; }

// for (int64_t tile = FirstTile(); tile < tiles; tile += TileStride())
__device__ inline int64_t FirstTile() {
  return int64_t{blockIdx.x} * kWarpsPerBlock + WarpInBlock();
}
__device__ inline int64_t TileStride() { return int64_t{gridDim.x} * kWarpsPerBlock; }

struct Plus {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Larger {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// The number of lanes on which something holds.
__device__ inline int CountLanes(bool holds) {
  return __popc(__ballot_sync(kAllLanes, holds));
}

__device__ inline bool IsNonfinite(float value) {
  return (BitsOf(value) & 0x7FFFFFFF) >= 0x7F800000;
}

// Adds a warp's count. Sums of integers do not depend on the order of warps.
__device__ inline void AddCount(int64_t* total, int64_t count) {
  if (Lane() != 0 || count == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(total),  // NOLINT: CUDA's own type.
            static_cast<unsigned long long>(count));       // NOLINT
}

// Writes the elements [begin, end) of the mean, whose sums a warp has in shared memory.
__device__ inline void WriteMeans(const float* sums, int64_t begin, int64_t end,
                                  int64_t num_workers, float* values) {
  __syncwarp();
  for (int64_t j = begin + Lane(); j < end; j += kWarp) {
    values[j] = __fdiv_rn(sums[j - begin], static_cast<float>(num_workers));
  }
  __syncwarp();
}

__device__ inline RandomStream ReadStream(const uint64_t* stream) {
  return RandomStream{stream[0], stream[1], stream[2]};
}

// The last of blocks first, ..., last that begins at or before element j.
__device__ inline int64_t BlockOf(const int64_t* row_splits, int64_t first,
                                  int64_t last, int64_t j) {
  while (first < last) {
    const int64_t middle = last - (last - first) / 2;
    if (row_splits[middle] <= j) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

// The last of `count` blocks for which is_before(block) holds. It holds for the first
// block and for no block after one for which it does not. A whole warp looks at kWarp
// blocks at once.
template <typename IsBefore>
__device__ int64_t LastBefore(int64_t count, const IsBefore& is_before) {
  constexpr int kLaneBits = 5;
  static_assert(kWarp == 1 << kLaneBits, "");
  int bits = 0;  // The blocks looked at are 2^bits apart.
  while ((count - 1) >> bits > 0) bits += kLaneBits;
  int64_t last = 0;
  while (bits > 0) {
    bits -= kLaneBits;
    const int64_t own = last + (int64_t{Lane()} << bits);
    last += int64_t{CountLanes(own < count && is_before(own)) - 1} << bits;
  }
  return last;
}

// The blocks of the elements [begin, end) of a tile. All lanes of a warp call its
// constructor together. No search per element is needed if the tile lies in one block.
class TileBlocks {
 public:
  __device__ TileBlocks(const int64_t* row_splits, int64_t num_blocks, int64_t begin,
                        int64_t end)
      : row_splits_(row_splits) {
    first = last = LastBefore(
        num_blocks, [&](int64_t block) { return row_splits[block] <= begin; });
    int more;  // No block is empty.
    do {
      const int64_t next = last + 1 + Lane();
      more = CountLanes(next < num_blocks && row_splits[next] < end);
      last += more;
    } while (more == kWarp);
  }

  __device__ int64_t Of(int64_t j) const {
    return BlockOf(row_splits_, first, last, j);
  }

  int64_t first, last;

 private:
  const int64_t* row_splits_;
};

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_WARP_H_
