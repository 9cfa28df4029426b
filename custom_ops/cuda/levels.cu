// Levels of blocks: found, rounded to and averaged.
//
// A thread block finds the levels of a block. It sorts nothing: it looks through the
// block's elements as often as needed, kept in shared memory where they fit. All sums
// are of integers, so their order is no matter.

#include "block.h"
#include "digits.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::WordsFor;

// Threads of a thread block for blocks of up to kKept elements; for larger ones they
// are kManyThreads.
constexpr int kKept = 4096, kFewThreads = 256;

// -- Elements of a block ----------------------------------------------------------

// Keys: integers in the order of the numbers. Both zeros have one.
__device__ inline uint32_t KeyOf(float x) {
  const uint32_t bits = IsZero(x) ? 0 : BitsOf(x);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

__device__ inline float NumberOf(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key);
}

__device__ inline int ExponentOf(float x) { return BitsOf(x) >> 23 & 0xFF; }

constexpr int kInfinite = 255;  // The exponent of what is infinite or NaN.

// The elements of a block, or their magnitudes. All threads call its functions, which
// give all of them the same result.
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
    exponent = Larger()(ExponentOf(NumberOf(smallest)), ExponentOf(NumberOf(largest)));
    // The fixed point's scale, 2^(156 - exponent), has no float: its two factors do.
    const int power = 156 - exponent;
    scale_ = __uint_as_float((127 + power / 2) << 23);
    other_scale_ = __uint_as_float((127 + power - power / 2) << 23);
  }

  // The integer q that stands for an element in sums.
  __device__ int FixedPoint(uint32_t key) const {
    const float x = NumberOf(key);
    if (ExponentOf(x) == 0) return 0;
    return __float2int_rn(__fmul_rn(__fmul_rn(x, scale_), other_scale_));
  }

  // The sum of value(key) over the elements.
  template <typename Value>
  __device__ int64_t Sum(const Value& value) const {
    int64_t sum = 0;
    ForEach(0, size, [&](uint32_t key) { sum += value(key); });
    return CombineThreads(sum, Plus());
  }

  // The largest element that is at most `last`: there is one.
  __device__ uint32_t LargestUpTo(uint32_t last) const {
    uint32_t most = 0;
    ForEach(0, size,
            [&](uint32_t key) { most = key <= last ? Larger()(most, key) : most; });
    return CombineThreads(most, Larger());
  }

  // The smallest element above `first`: there is one.
  __device__ uint32_t SmallestAbove(uint32_t first) const {
    uint32_t most = 0;  // Of the keys reversed.
    ForEach(0, size,
            [&](uint32_t key) { most = key > first ? Larger()(most, ~key) : most; });
    return ~CombineThreads(most, Larger());
  }

  // The rank-th largest of the elements that are at most `last`, counted from 1. It is
  // known to be at least `first`. Digit by digit from the highest in which these two
  // differ, by the number of elements with each digit.
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
  int exponent;  // Of the largest magnitude.

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
  float scale_, other_scale_;
};

// -- The rules --------------------------------------------------------------------

// The level between two others by the optimal rule. Of equal elements it is no matter
// which of them the two are, so they are given as keys, not by rank.
__device__ inline uint32_t Middle(const Elements& elements, uint32_t left,
                                  uint32_t right) {
  const int64_t low = elements.FixedPoint(left);
  const int64_t width = elements.FixedPoint(right) - low;
  if (width == 0) return right;
  const int64_t over = elements.Sum([&](uint32_t key) -> int64_t {
    return left < key && key <= right ? elements.FixedPoint(key) - low : 0;
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

// size * q less the sum of what is as large or larger rises from element to element. By
// halves, it is found where it stops being negative, and which of the two elements
// there it is nearer to 0 at.
__device__ inline uint32_t FindSymmetric(const Elements& elements) {
  const auto excess = [&](uint32_t level) {
    const int64_t above = elements.Sum([&](uint32_t key) -> int64_t {
      return key >= level ? elements.FixedPoint(key) : 0;
    });
    return elements.size * elements.FixedPoint(level) - above;
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
  if (elements.FixedPoint(low) == 0) low = elements.smallest;
  return -excess(low) <= excess(high) ? low : high;
}

__device__ inline void FindMeans(const Elements& elements, float* levels) {
  const auto mean = [&](int64_t sum, int64_t number) {
    const double wide = ldexp(static_cast<double>(sum) / static_cast<double>(number),
                              elements.exponent - 156);
    return fabs(wide) < 0x1p-126 ? 0 : static_cast<float>(wide);
  };
  const int64_t size = elements.size;
  const int64_t sum =
      elements.Sum([&](uint32_t key) -> int64_t { return elements.FixedPoint(key); });
  const float middle = mean(sum, size);
  const uint32_t edge = KeyOf(middle);
  const int64_t below = elements.Sum([&](uint32_t key) -> int64_t {
    return key < edge ? elements.FixedPoint(key) : 0;
  });
  const int64_t number = elements.Sum([&](uint32_t key) { return key < edge; });
  if (threadIdx.x != 0) return;
  levels[0] = number > 0 ? mean(below, number) : middle;
  levels[1] = middle;
  levels[2] = number < size ? mean(sum - below, size - number) : middle;
}

__global__ void __launch_bounds__(kManyThreads) FindLevelsKernel(FindLevels args) {
  __shared__ uint32_t keys[kKept];
  for (int64_t block = blockIdx.x; block < args.num_blocks; block += gridDim.x) {
    const int64_t begin = args.row_splits[block];
    float* levels = args.levels + block * args.count;
    const Elements elements(args.x.whole + begin, args.row_splits[block + 1] - begin,
                            args.rule == LevelRule::kSymmetric, keys);
    if (elements.exponent == kInfinite) {
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

// -- Codes ------------------------------------------------------------------------

// The number of inner levels that are at most x: none for a NaN.
__device__ inline int64_t InnerLevelsUpTo(const float* levels, int64_t count, float x) {
  int64_t low = 0, high = count - 2;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (levels[middle + 1] <= x) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads)
    PackLevelsKernel(PackLevels args, Base base) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
#pragma unroll 8
    for (int e = Lane(); e < count; e += kWarp) {
      tile[PlaceOf(e)] = BitsOf(args.x.whole[begin + e]);
    }
    __syncwarp();
    // Four at a time, as many as share a block of Philox; a tile begins with such four.
    for (int e = 4 * Lane(); e < count; e += 4 * kWarp) {
      uint32_t random[4] = {};
      if (args.stream != nullptr) {
        tfgradcomp_format::Philox(ReadStream(args.stream),
                                  static_cast<uint64_t>(begin + e) / 4, random);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (e + i >= count) break;
        uint32_t& place = tile[PlaceOf(e + i)];
        const float x = __uint_as_float(place);
        const float* levels = args.levels + blocks.Of(begin + e + i) * args.count;
        const int64_t k = InnerLevelsUpTo(levels, args.count, x);
        place = static_cast<uint32_t>(k);
        if (args.stream == nullptr) continue;
        const float width = __fsub_rn(levels[k + 1], levels[k]);
        const float uniform = tfgradcomp_format::Uniform(random[i]);
        place += __fmul_rn(uniform, width) < __fsub_rn(x, levels[k]);
      }
    }
    __syncwarp();
    PackTile(tile, count, base, args.words + begin / base.digits);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads)
    MeanOfLevelsKernel(MeanOfLevels args, Base base, int64_t words_per_worker) {
  __shared__ float tiles[kWarpsPerBlock][kTilePlaces];
  float* tile = tiles[WarpInBlock()];
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    const uint32_t* words = args.words + begin / base.digits;
    for (int word = Lane(); word * base.digits < count; word += kWarp) {
      const int word_begin = word * base.digits;
      const int word_end =
          word_begin + base.digits < count ? word_begin + base.digits : count;
      for (int64_t worker = 0; worker < args.num_workers; ++worker) {
        uint32_t left = words[worker * words_per_worker + word];
        const float* levels = args.levels + worker * args.num_blocks * args.count;
        for (int e = word_begin; e < word_end; ++e) {
          const uint32_t quotient = base.Quotient(left);
          const uint32_t code = left - quotient * base.value;
          left = quotient;
          const float level = levels[blocks.Of(begin + e) * args.count + code];
          float& total = tile[PlaceOf(e)];
          total = worker == 0 ? level : __fadd_rn(total, level);
        }
      }
    }
    __syncwarp();
    for (int e = Lane(); e < count; e += kWarp) {
      args.values.whole[begin + e] =
          __fdiv_rn(tile[PlaceOf(e)], static_cast<float>(args.num_workers));
    }
    __syncwarp();
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const FindLevels& args) {
  const char* error = SetZero(gpu, args.nonfinite);
  if (error != nullptr) return error;
  const bool few = args.size <= kKept * args.num_blocks;
  return LaunchBlocks(gpu, args.num_blocks, few ? kFewThreads : kManyThreads,
                      FindLevelsKernel, args);
}

const char* Run(const Gpu& gpu, const PackLevels& args) {
  const Base base(args.stream == nullptr ? args.count - 1 : args.count);
  return Launch(gpu, CeilDiv(args.size, base.TileElements()), PackLevelsKernel, args,
                base);
}

const char* Run(const Gpu& gpu, const MeanOfLevels& args) {
  const Base base(args.count);
  return Launch(gpu, CeilDiv(args.size, base.TileElements()), MeanOfLevelsKernel, args,
                base, WordsFor(args.size, args.count));
}

}  // namespace tfgradcomp
