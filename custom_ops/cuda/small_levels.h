// The levels of small blocks. A warp sorts a block in its registers; then each rule
// looks up ranks and sums of the sorted elements.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_SMALL_LEVELS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_SMALL_LEVELS_H_

#include "keys.h"

namespace tfgradcomp {
namespace {

// Elements of a block that each lane sorts: few for the smallest blocks.
constexpr int kFewEach = 16, kMostEach = 64;
constexpr int64_t kMostSorted = kMostEach * kWarp;
constexpr int kSortWarps = 4;  // In a thread block, whose shared memory they share.

// -- Sorting ------------------------------------------------------------------------

// Runs are merged as in bitonic sort, but a run's second half is taken backwards, so
// that the smaller key of a pair always goes to the lower place.

__device__ inline void Order(uint32_t& lower, uint32_t& upper) {
  const uint32_t smaller = lower < upper ? lower : upper;
  upper = Larger()(lower, upper);
  lower = smaller;
}

// Compares each half of kRun neighbours with the other one, then halves of halves.
template <int kRun, int kEach>
__device__ void OrderHalves(uint32_t (&keys)[kEach]) {
  if constexpr (kRun > 1) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i % kRun < kRun / 2) Order(keys[i], keys[i + kRun / 2]);
    }
    OrderHalves<kRun / 2>(keys);
  }
}

template <int kRun, int kEach>
__device__ void SortRuns(uint32_t (&keys)[kEach]) {
  if constexpr (kRun > 1) {
    SortRuns<kRun / 2>(keys);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i % kRun < kRun / 2) Order(keys[i], keys[i ^ (kRun - 1)]);
    }
    OrderHalves<kRun / 2>(keys);
  }
}

// Sorts the keys of a warp: the first kEach go to lane 0, and so on.
template <int kEach>
__device__ void SortWarp(uint32_t (&keys)[kEach]) {
  bool is_upper;
  const auto order = [&](uint32_t& key, uint32_t other) {
    key = (key < other) != is_upper ? key : other;
  };
  SortRuns<kEach>(keys);
#pragma unroll 1
  for (int lanes = 2; lanes <= kWarp; lanes *= 2) {
    is_upper = (Lane() & (lanes / 2)) != 0;
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      uint32_t &first = keys[i], &last = keys[kEach - 1 - i];
      const uint32_t other_last = __shfl_xor_sync(kAllLanes, last, lanes - 1);
      const uint32_t other_first = __shfl_xor_sync(kAllLanes, first, lanes - 1);
      order(first, other_last);
      order(last, other_first);
    }
#pragma unroll 1
    for (int distance = lanes / 4; distance > 0; distance /= 2) {
      is_upper = (Lane() & distance) != 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        order(keys[i], __shfl_xor_sync(kAllLanes, keys[i], distance));
      }
    }
    OrderHalves<kEach>(keys);
  }
}

// -- Blocks -------------------------------------------------------------------------

template <typename T, typename Combine>
__device__ T CombineLanes(T value, Combine combine) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// The elements of a block in the registers of a warp, or their magnitudes. Lane l has
// the elements l, l + 32, ...; or, once sorted, neighbours.
template <int kEach>
struct BlockOfWarp {
  __device__ BlockOfWarp(const float* x, int size, bool magnitudes) : size(size) {
    float loaded[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = i * kWarp + Lane();
      loaded[i] = e < size ? x[e] : 0;
    }
    uint32_t most = 0, most_turned = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t key = KeyOf(magnitudes ? fabsf(loaded[i]) : loaded[i]);
      const bool is_element = i * kWarp + Lane() < size;
      keys[i] = is_element ? key : kNothing;
      most = is_element ? Larger()(most, key) : most;
      most_turned = Larger()(most_turned, ~keys[i]);
    }
    largest = CombineLanes(most, Larger());
    smallest = ~CombineLanes(most_turned, Larger());
    fixed_point = FixedPoint(smallest, largest);
  }

  // The sum of value(key) over the elements, unless they are sorted.
  template <typename Value>
  __device__ int64_t Sum(const Value& value) const {
    int64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * kWarp + Lane() < size) sum += value(keys[i]);
    }
    return CombineLanes(sum, Plus());
  }

  static constexpr uint32_t kNothing = 0xFFFFFFFF;  // Comes last.
  int size;
  uint32_t keys[kEach];
  uint32_t smallest, largest;
  FixedPoint fixed_point;
};

// Sums are kept up to each kGroup-th element.
constexpr int kGroup = 8;

// The shared memory of a warp. The gaps spread the accesses of lanes over the banks.
struct SortedRoom {
  uint32_t keys[kMostSorted + kWarp];
  int64_t sums[(kMostSorted + kMostEach) / kGroup];
};

// A sorted block, in shared memory.
template <int kEach>
class SortedBlock {
 public:
  // Sorts the block. The warp must have synchronized since it last used the room.
  __device__ SortedBlock(BlockOfWarp<kEach>& block, SortedRoom& room)
      : size(block.size), fixed_point_(block.fixed_point), room_(room) {
    SortWarp(block.keys);
    int64_t sums[kEach / kGroup] = {}, sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i % kGroup == 0) sums[i / kGroup] = sum;
      sum += fixed_point_(block.keys[i]);  // Behind the elements, sums are not read.
      room_.keys[Lane() * (kEach + 1) + i] = block.keys[i];
    }
    int64_t up_to = sum;  // The sum of the lanes up to this one.
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, up_to, distance);
      if (Lane() >= distance) up_to += other;
    }
#pragma unroll
    for (int i = 0; i < kEach / kGroup; ++i) {
      room_.sums[i * (kWarp + 1) + Lane()] = up_to - sum + sums[i];
    }
    if (Lane() == kWarp - 1) room_.sums[kWarp] = up_to;
    __syncwarp();
  }

  // The key at a place, or the smallest or largest one if it is before or behind all.
  __device__ uint32_t Key(int place) const {
    place = place < 0 ? 0 : place < size ? place : size - 1;
    return room_.keys[place + place / kEach];
  }

  __device__ int64_t Fixed(int place) const { return fixed_point_(Key(place)); }

  __device__ int64_t SumOfFirst(int count) const {
    int64_t sum = room_.sums[count % kEach / kGroup * (kWarp + 1) + count / kEach];
    for (int i = count / kGroup * kGroup; i < count; ++i) sum += Fixed(i);
    return sum;
  }

  // The number of places for which holds(place). They must be the first ones. The lanes
  // try as many places at once.
  template <typename Holds>
  __device__ int CountPlaces(const Holds& holds) const {
    int begin = 0, end = size;
    while (begin < end) {
      const int step = static_cast<int>(CeilDiv(end - begin, kWarp));
      const int place = begin + Lane() * step;
      const int count = CountLanes(place < end && holds(place));
      const int last = begin + count * step;
      if (last < end) end = last;
      if (count == 0) break;
      begin = last - step + 1;
    }
    return begin;
  }

  const int size;

 private:
  const FixedPoint fixed_point_;
  SortedRoom& room_;
};

// -- The rules ----------------------------------------------------------------------

// The place of the level between two others by the optimal rule. They are given by
// their places: -1 for the first level and `size` for the last one, so that all
// elements are between them.
template <int kEach>
__device__ int MiddlePlace(const SortedBlock<kEach>& block, int left, int right) {
  const int64_t low = block.Fixed(left), width = block.Fixed(right) - low;
  if (width == 0) return right;
  const int64_t sum = block.SumOfFirst(right) - block.SumOfFirst(left + 1);
  return right - static_cast<int>(CeilDiv(sum - (right - left - 1) * low, width));
}

template <int kEach>
__device__ void FindOptimal(const SortedBlock<kEach>& block, int64_t count,
                            int64_t sweeps, float* levels) {
  // Until the end, the bits of a level are its place.
  const auto place = [&](int64_t k) { return static_cast<int>(BitsOf(levels[k])); };
  const auto set = [&](int64_t k, int place) {
    levels[k] = __uint_as_float(static_cast<uint32_t>(place));
  };
  if (Lane() == 0) {
    set(0, -1);
    set(count - 1, block.size);
  }
  __syncwarp();
  for (int64_t step = count - 1; step > 1; step /= 2) {
    for (int64_t k = step * Lane(); k < count - 1; k += step * kWarp) {
      set(k + step / 2, MiddlePlace(block, place(k), place(k + step)));
    }
    __syncwarp();
  }
  for (int64_t sweep = 0; sweep < sweeps && Lane() == 0; ++sweep) {
    for (int64_t k = 1; k < count - 1; ++k) {
      set(k, MiddlePlace(block, place(k - 1), place(k + 1)));
    }
  }
  __syncwarp();
  for (int64_t k = Lane(); k < count; k += kWarp) {
    levels[k] = NumberOf(block.Key(place(k)));
  }
}

template <int kEach>
__device__ void FindQuantiles(const SortedBlock<kEach>& block, int64_t count,
                              float* levels) {
  const int64_t steps = count - 1;
  for (int64_t k = Lane(); k < count; k += kWarp) {
    const int64_t place = (2 * k * (block.size - 1) + steps) / (2 * steps);
    levels[k] = NumberOf(block.Key(static_cast<int>(place)));
  }
}

// As for larger blocks (see find_levels.cu), but from place to place.
template <int kEach>
__device__ void FindSymmetric(const SortedBlock<kEach>& block, float* levels) {
  const int64_t size = block.size, total = block.SumOfFirst(block.size);
  const auto excess = [&](int place, int first) {
    return size * block.Fixed(place) - (total - block.SumOfFirst(first));
  };
  const int negative =
      block.CountPlaces([&](int place) { return excess(place, place) < 0; });
  uint32_t low = block.Key(negative - 1);
  // Equal elements count together.
  const int first =
      block.CountPlaces([&](int place) { return block.Key(place) < low; });
  const int next =
      block.CountPlaces([&](int place) { return block.Key(place) <= low; });
  const bool is_low = -excess(first, first) <= excess(next, next);
  // All elements with q = 0 are equally near: the smallest is taken.
  if (block.Fixed(first) == 0) low = block.Key(0);
  const float level = NumberOf(is_low ? low : block.Key(next));
  if (Lane() != 0) return;
  levels[0] = 0 - level;  // No -0.
  levels[1] = level;
}

template <int kEach>
__device__ void FindMeans(const BlockOfWarp<kEach>& block, float* levels) {
  const FixedPoint& fixed_point = block.fixed_point;
  const int64_t size = block.size;
  const int64_t sum =
      block.Sum([&](uint32_t key) -> int64_t { return fixed_point(key); });
  const float middle = fixed_point.Mean(sum, size);
  const uint32_t edge = KeyOf(middle);
  const int64_t below = block.Sum(
      [&](uint32_t key) -> int64_t { return key < edge ? fixed_point(key) : 0; });
  const int64_t number = block.Sum([&](uint32_t key) { return key < edge; });
  if (Lane() != 0) return;
  levels[0] = number > 0 ? fixed_point.Mean(below, number) : middle;
  levels[1] = middle;
  levels[2] = number < size ? fixed_point.Mean(sum - below, size - number) : middle;
}

template <int kEach>
__device__ void FindLevelsOfSmall(const FindLevels& args, const float* x, int size,
                                  float* levels, SortedRoom& room) {
  BlockOfWarp<kEach> block(x, size, args.rule == LevelRule::kSymmetric);
  if (block.fixed_point.exponent == kInfinite) {
    AddCount(args.nonfinite, block.Sum([](uint32_t key) {
      return ExponentOf(NumberOf(key)) == kInfinite;
    }));
    for (int64_t k = Lane(); k < args.count; k += kWarp) levels[k] = 0;
  } else if (args.rule == LevelRule::kMeans) {
    FindMeans(block, levels);
  } else {
    const SortedBlock<kEach> sorted(block, room);
    if (args.rule == LevelRule::kOptimal) {
      FindOptimal(sorted, args.count, args.sweeps, levels);
    } else if (args.rule == LevelRule::kQuantiles) {
      FindQuantiles(sorted, args.count, levels);
    } else {
      FindSymmetric(sorted, levels);
    }
  }
}

// Finds the levels of the blocks of up to `most` elements.
__global__ void __launch_bounds__(kSortWarps* kWarp, 4)
    FindLevelsOfSmallKernel(FindLevels args, int64_t most) {
  __shared__ SortedRoom rooms[kSortWarps];
  SortedRoom& room = rooms[WarpInBlock()];
  for (int64_t block = int64_t{blockIdx.x} * kSortWarps + WarpInBlock();
       block < args.num_blocks; block += int64_t{gridDim.x} * kSortWarps) {
    const int64_t begin = args.row_splits[block];
    const int64_t size = args.row_splits[block + 1] - begin;
    if (size > most) continue;
    const float* x = args.x.whole + begin;
    float* levels = args.levels + block * args.count;
    if (size <= kFewEach * kWarp) {
      FindLevelsOfSmall<kFewEach>(args, x, static_cast<int>(size), levels, room);
    } else {
      FindLevelsOfSmall<kMostEach>(args, x, static_cast<int>(size), levels, room);
    }
    __syncwarp();
  }
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_SMALL_LEVELS_H_
