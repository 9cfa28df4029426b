// Finding the levels of blocks.
//
// A thread block finds the levels of a block. It does not sort: it scans the block's
// elements as often as needed, in shared memory if they fit. All sums are of integers,
// so their order does not matter. Large blocks: large_levels.h.

#include "block.h"
#include "keys.h"
#include "large_levels.h"

namespace tfgradcomp {
namespace {

// Threads of a thread block for blocks of up to kKept elements; for larger ones they
// are kManyThreads.
constexpr int kKept = 4096, kFewThreads = 256;

// The elements of a block, or their magnitudes. All threads call its functions, and all
// get the same result.
class Elements {
 public:
  __device__ Elements(const float* x, int64_t size, bool magnitudes, uint32_t* keys)
      : size(size), x_(x), magnitudes_(magnitudes), keys_(keys) {
    uint32_t most = 0, most_reversed = 0;
    InBatches(
        0, size, [&](int64_t i) { return KeyAt(i); },
        [&](int64_t i, uint32_t key) {
          if (size <= kKept) keys_[i] = key;
          most = Larger()(most, key);
          most_reversed = Larger()(most_reversed, ~key);
        });
    largest = CombineThreads(most, Larger());
    smallest = ~CombineThreads(most_reversed, Larger());
    fixed_point = FixedPoint(smallest, largest);
  }

  // The sum of value(key) over the elements.
  template <typename Value>
  __device__ int64_t Sum(const Value& value) const {
    int64_t sum = 0;
    ForEach(0, size, [&](uint32_t key) { sum += value(key); });
    return CombineThreads(sum, Plus());
  }

  // The largest element that is at most `last`. It must exist.
  __device__ uint32_t LargestUpTo(uint32_t last) const {
    uint32_t most = 0;
    ForEach(0, size,
            [&](uint32_t key) { most = key <= last ? Larger()(most, key) : most; });
    return CombineThreads(most, Larger());
  }

  // The smallest element above `first`. It must exist.
  __device__ uint32_t SmallestAbove(uint32_t first) const {
    uint32_t most = 0;  // Of the keys reversed.
    ForEach(0, size,
            [&](uint32_t key) { most = key > first ? Larger()(most, ~key) : most; });
    return ~CombineThreads(most, Larger());
  }

  // The rank-th largest of the elements that are at most `last`, counted from 1. It
  // must be at least `first`. It is found digit by digit, from the highest digit in
  // which these two differ, by the number of elements with each digit.
  __device__ uint32_t Select(int64_t rank, uint32_t first, uint32_t last) const {
    constexpr int kDigitBits = 8, kBins = 1 << kDigitBits;
    constexpr int64_t kCounted = 1 << 17;  // No more at once than a bin holds.
    static_assert(kBins <= kFewThreads, "");
    __shared__ uint32_t bins[kBins];
    __shared__ uint32_t found_digit;
    __shared__ int64_t found_before;
    int bits = 32 - __clz(static_cast<int>(first ^ last));
    uint32_t key = static_cast<uint32_t>(uint64_t{last} >> bits << bits);
    while (bits > 0) {
      const int shift = bits > kDigitBits ? bits - kDigitBits : 0;
      const uint32_t digits = 1u << (bits - shift);
      int64_t count = 0;  // Of digit kBins - 1 - threadIdx.x: the largest comes first.
      for (int64_t begin = 0; begin < size; begin += kCounted) {
        if (threadIdx.x < kBins) bins[threadIdx.x] = 0;
        __syncthreads();
        ForEach(begin, begin + kCounted < size ? begin + kCounted : size,
                [&](uint32_t other) {
                  const uint32_t digit = (other ^ key) >> shift;
                  if (other > last || digit >= digits) return;
                  atomicAdd(&bins[kBins - 1 - digit], 1u);
                });
        __syncthreads();
        if (threadIdx.x < kBins) count += bins[threadIdx.x];
      }
      const int64_t before = SumBefore(count);
      if (before < rank && rank <= before + count) {
        found_digit = kBins - 1 - threadIdx.x;
        found_before = before;
      }
      __syncthreads();
      key |= found_digit << shift;
      rank -= found_before;
      bits = shift;
    }
    return key;
  }

  int64_t size;
  uint32_t smallest, largest;
  FixedPoint fixed_point;

 private:
  __device__ uint32_t KeyAt(int64_t i) const {
    return KeyOf(magnitudes_ ? fabsf(x_[i]) : x_[i]);
  }

  // Calls body(i, load(i)) for i in [begin, end), a part of them in each thread.
  template <typename Load, typename Body>
  static __device__ void InBatches(int64_t begin, int64_t end, const Load& load,
                                   const Body& body) {
    constexpr int kAtOnce = 4;  // Loads, so that the memory has enough to do.
    const int threads = static_cast<int>(blockDim.x);
    for (int64_t i = begin + threadIdx.x; i < end; i += kAtOnce * threads) {
      uint32_t key[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        key[k] = i + k * threads < end ? load(i + k * threads) : 0;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (i + k * threads < end) body(i + k * threads, key[k]);
      }
    }
  }

  // Calls body(key) for the elements [begin, end).
  template <typename Body>
  __device__ void ForEach(int64_t begin, int64_t end, const Body& body) const {
    InBatches(
        begin, end, [&](int64_t i) { return size <= kKept ? keys_[i] : KeyAt(i); },
        [&](int64_t, uint32_t key) { body(key); });
  }

  const float* x_;
  bool magnitudes_;
  uint32_t* keys_;  // [kKept], shared, of the elements of a block of at most so many.
};

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

__global__ void __launch_bounds__(kManyThreads)
    FindLevelsKernel(FindLevels args, int64_t most) {
  __shared__ uint32_t keys[kKept];
  for (int64_t block = blockIdx.x; block < args.num_blocks; block += gridDim.x) {
    const int64_t begin = args.row_splits[block];
    if (args.row_splits[block + 1] - begin > most) continue;
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
}

}  // namespace

const char* Run(const Gpu& gpu, const FindLevels& args) {
  const char* error = SetZero(gpu, args.nonfinite);
  const bool divide = FindsLevelsOfLarge(args);
  if (error == nullptr && divide) error = FindLevelsOfLarge(gpu, args);
  if (error != nullptr) return error;
  const bool few = args.size <= kKept * args.num_blocks;
  const int64_t most = divide ? tfgradcomp_format::kLargeBlock : args.size;
  return LaunchBlocks(gpu, args.num_blocks, few ? kFewThreads : kManyThreads,
                      FindLevelsKernel, args, most);
}

}  // namespace tfgradcomp
