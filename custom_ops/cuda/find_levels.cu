// Finding the levels of blocks.
//
// A thread block finds the levels of a block. It does not sort: it scans the block's
// elements as often as needed, in shared memory if they fit. All sums are of integers,
// so their order does not matter. Small blocks: small_levels.h. Large blocks:
// large_levels.h.

#include "elements.h"
#include "large_levels.h"
#include "small_levels.h"

namespace tfgradcomp {
namespace {

// -- The rules --------------------------------------------------------------------

// The level between two others by the optimal rule. Equal elements are interchangeable,
// so the two levels are given as keys, not by rank.
__device__ inline uint32_t Middle(const Elements& elements, uint32_t left,
                                  uint32_t right) {
  const int64_t low = elements.fixed_point(left);
  const int64_t width = elements.fixed_point(right) - low;
  if (width == 0) return right;
  const int64_t over = elements.Sum([&](uint32_t key) -> int64_t {
    return left < key && key <= right ? elements.fixed_point(key) - low : 0;
  });
  return elements.Select(CeilDiv(over, width), left, right);
}

__device__ inline void FindOptimal(const Elements& elements, int64_t count,
                                   int64_t sweeps, float* levels) {
  const auto set = [&](int64_t k, uint32_t key) {
    if (threadIdx.x == 0) levels[k] = NumberOf(key);
    __syncthreads();
  };
  const auto set_between = [&](int64_t k, int64_t left, int64_t right) {
    set(k, Middle(elements, KeyOf(levels[left]), KeyOf(levels[right])));
  };
  set(0, elements.smallest);
  set(count - 1, elements.largest);
  for (int64_t step = count - 1; step > 1; step /= 2) {
    for (int64_t k = 0; k < count - 1; k += step) {
      set_between(k + step / 2, k, k + step);
    }
  }
  for (int64_t sweep = 0; sweep < sweeps; ++sweep) {
    for (int64_t k = 1; k < count - 1; ++k) set_between(k, k - 1, k + 1);
  }
}

__device__ inline void FindQuantiles(const Elements& elements, int64_t count,
                                     float* levels) {
  for (int64_t k = 0; k < count; ++k) {
    const int64_t rank = (2 * k * (elements.size - 1) + count - 1) / (2 * (count - 1));
    const uint32_t key =
        elements.Select(elements.size - rank, elements.smallest, elements.largest);
    if (threadIdx.x == 0) levels[k] = NumberOf(key);
  }
}

// size * q less the sum of the elements as large or larger rises from element to
// element. Bisection finds where it stops being negative, and at which of the two
// elements there it is nearer to 0.
__device__ inline uint32_t FindSymmetric(const Elements& elements) {
  const auto excess = [&](uint32_t level) {
    const int64_t above = elements.Sum([&](uint32_t key) -> int64_t {
      return key >= level ? elements.fixed_point(key) : 0;
    });
    return elements.size * elements.fixed_point(level) - above;
  };
  if (elements.smallest == elements.largest) return elements.smallest;
  uint32_t low = elements.smallest, high = elements.largest;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (excess(middle) < 0 ? low : high) = middle;
  }
  high = elements.SmallestAbove(low);
  low = elements.LargestUpTo(low);
  // All elements with q = 0 are equally near: the smallest is taken.
  if (elements.fixed_point(low) == 0) low = elements.smallest;
  return -excess(low) <= excess(high) ? low : high;
}

__device__ inline void FindMeans(const Elements& elements, float* levels) {
  const auto mean = [&](int64_t sum, int64_t number) {
    return elements.fixed_point.Mean(sum, number);
  };
  const int64_t size = elements.size;
  const int64_t sum =
      elements.Sum([&](uint32_t key) -> int64_t { return elements.fixed_point(key); });
  const float middle = mean(sum, size);
  const uint32_t edge = KeyOf(middle);
  const int64_t below = elements.Sum([&](uint32_t key) -> int64_t {
    return key < edge ? elements.fixed_point(key) : 0;
  });
  const int64_t number = elements.Sum([&](uint32_t key) { return key < edge; });
  if (threadIdx.x != 0) return;
  levels[0] = number > 0 ? mean(below, number) : middle;
  levels[1] = middle;
  levels[2] = number < size ? mean(sum - below, size - number) : middle;
}

__device__ inline void FindLevelsOfBlock(const FindLevels& args, int64_t block,
                                         uint32_t* keys) {
  const int64_t begin = args.row_splits[block];
  float* levels = args.levels + block * args.count;
  const Elements elements(args.x.whole + begin, args.row_splits[block + 1] - begin,
                          args.rule == LevelRule::kSymmetric, keys);
  if (elements.fixed_point.exponent == kInfinite) {
    const int64_t nonfinite = elements.Sum(
        [](uint32_t key) { return ExponentOf(NumberOf(key)) == kInfinite; });
    if (WarpInBlock() == 0) AddCount(args.nonfinite, nonfinite);
    for (int64_t k = threadIdx.x; k < args.count; k += blockDim.x) levels[k] = 0;
  } else if (args.rule == LevelRule::kOptimal) {
    FindOptimal(elements, args.count, args.sweeps, levels);
  } else if (args.rule == LevelRule::kQuantiles) {
    FindQuantiles(elements, args.count, levels);
  } else if (args.rule == LevelRule::kSymmetric) {
    const float level = NumberOf(FindSymmetric(elements));
    if (threadIdx.x == 0) {
      levels[0] = 0 - level;  // No -0.
      levels[1] = level;
    }
  } else {
    FindMeans(elements, levels);
  }
}

constexpr int64_t kMostMiddleBlocks = 1024;

// Finds the levels of the blocks of more than `least` and up to `most` elements. There
// may be none among many small ones, so each warp reads the sizes of kWarp blocks at
// once.
__global__ void __launch_bounds__(kManyThreads)
    FindLevelsKernel(FindLevels args, int64_t least, int64_t most) {
  __shared__ uint32_t keys[kKept];
  const int64_t stride = gridDim.x;
  for (int64_t first = blockIdx.x; first < args.num_blocks; first += stride * kWarp) {
    const int64_t own = first + Lane() * stride;
    int64_t size = 0;
    if (own < args.num_blocks) size = args.row_splits[own + 1] - args.row_splits[own];
    unsigned found = __ballot_sync(kAllLanes, least < size && size <= most);
    for (; found != 0; found &= found - 1) {
      const int lane = __popc((found & (0 - found)) - 1);
      FindLevelsOfBlock(args, first + lane * stride, keys);
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const FindLevels& args) {
  const char* error = SetZero(gpu, args.nonfinite);
  const bool divide = FindsLevelsOfLarge(args);
  if (error == nullptr && divide) error = FindLevelsOfLarge(gpu, args);
  if (error != nullptr) return error;
  const int64_t most = divide ? tfgradcomp_format::kLargeBlock : args.size;
  const int64_t small = most < kMostSorted ? most : kMostSorted;
  error = LaunchBlocks(gpu, CeilDiv(args.num_blocks, kSortWarps), kSortWarps * kWarp,
                       FindLevelsOfSmallKernel, args, small);
  if (error != nullptr || most <= small) return error;
  const int64_t blocks =
      args.num_blocks < kMostMiddleBlocks ? args.num_blocks : kMostMiddleBlocks;
  const bool few = args.size <= kKept * args.num_blocks;
  return LaunchBlocks(gpu, blocks, few ? kFewThreads : kManyThreads, FindLevelsKernel,
                      args, small, most);
}

}  // namespace tfgradcomp
