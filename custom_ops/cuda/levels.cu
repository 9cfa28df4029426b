// Rounding to the levels of blocks, and their mean.

#include <type_traits>

#include "digits.h"
#include "fours.h"
#include "random.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::WordsFor;

// Up to this many levels of a block are copied to shared memory.
constexpr int kFewLevels = 64;

// -- Packing ------------------------------------------------------------------------

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

constexpr int kAtOnce = 4;  // Neighbouring elements of a lane.

// Few levels of a block, in the shared memory of a warp.
struct FewLevels {
  __device__ void Take(const float* block, int64_t count) {
    __syncwarp();
    for (int k = Lane(); k < kFewLevels; k += kWarp) {
      const float level = k < count ? block[k] : 0;
      all[k] = level;
      inner[k] = k < count - 1 ? level : __uint_as_float(0x7FFFFFFF);
    }
    __syncwarp();
  }

  // Finds the numbers of inner levels that are at most each x.
  __device__ void Find(int64_t count, const float (&x)[kAtOnce],
                       int (&k)[kAtOnce]) const {
#pragma unroll
    for (int step = kFewLevels / 2; step > 0; step /= 2) {
      if (step > count - 2) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (inner[k[i] + step] <= x[i]) k[i] |= step;
      }
    }
  }

  float all[kFewLevels];
  float inner[kFewLevels];  // NaN beyond them. The first is not used.
};

__device__ inline Comparison GoesUp(const float* levels, int64_t k, float x) {
  return {__fsub_rn(levels[k + 1], levels[k]), __fsub_rn(x, levels[k])};
}

// Reads neighbouring numbers, of which `left` exist.
__device__ inline void ReadNumbers(const float* numbers, int64_t left,
                                   float (&x)[kAtOnce]) {
  if (left >= kAtOnce) {
    const Four<float> four = LoadFour(numbers, 0, IsAligned(numbers));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = four.at[i];
  } else {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = i < left ? numbers[i] : 0;
  }
}

// The part of a block that lies in a tile.
struct PartOfBlock {
  __device__ PartOfBlock(const int64_t* row_splits, int64_t block, int64_t begin,
                         int count) {
    const int64_t low = row_splits[block] - begin, high = row_splits[block + 1] - begin;
    first = low > 0 ? static_cast<int>(low) : 0;
    last = high < count ? static_cast<int>(high) - 1 : count - 1;
  }
  int first, last;
};

// kFew: there are up to kFewLevels levels.
template <bool kFew>
__global__ void __launch_bounds__(kThreads)
    PackLevelsKernel(PackLevels args, Base base) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  __shared__ uint32_t uppers[kWarpsPerBlock][kTile / 4];
  __shared__ Waiting waitings[kWarpsPerBlock];
  __shared__ FewLevels few_levels[kWarpsPerBlock];
  uint32_t *tile = tiles[WarpInBlock()], *upper = uppers[WarpInBlock()];
  Waiting& waiting = waitings[WarpInBlock()];
  FewLevels& few = few_levels[WarpInBlock()];
  const bool draws = args.stream != nullptr;
  const RandomStream stream = draws ? ReadStream(args.stream) : RandomStream{};
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    const auto decide = [&](int e) {
      const int64_t j = begin + e;
      const float x = args.x.whole[j];
      const float* levels = args.levels + blocks.Of(j) * args.count;
      const int64_t k = InnerLevelsUpTo(levels, args.count, x);
      const bool up = GoesUp(levels, k, x).Holds(tfgradcomp_format::Uniform(stream, j));
      tile[PlaceOf(e)] = static_cast<uint32_t>(k) + up;
    };
    waiting.Clear();
    if (draws) DrawUpper(stream, begin, count, upper);
    for (int64_t block = blocks.first; block <= blocks.last; ++block) {
      const PartOfBlock part(args.row_splits, block, begin, count);
      const float* levels = args.levels + block * args.count;
      if (kFew) few.Take(levels, args.count);
      __syncwarp();
      for (int first = part.first / kAtOnce * kAtOnce + Lane() * kAtOnce;
           first <= part.last; first += kWarp * kAtOnce) {
        float x[kAtOnce];
        ReadNumbers(args.x.whole + begin + first, count - first, x);
        int k[kAtOnce] = {};
        if (kFew) {
          few.Find(args.count, x, k);
        } else {
          for (int i = 0; i < kAtOnce; ++i) {
            k[i] = static_cast<int>(InnerLevelsUpTo(levels, args.count, x[i]));
          }
        }
        unsigned undecided = 0;
        if (draws) {
          const uint32_t bits = upper[first / 4];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            bool is_undecided;
            const Comparison goes_up = GoesUp(kFew ? few.all : levels, k[i], x[i]);
            k[i] += goes_up.Holds(bits >> (8 * i) & 0xFF, &is_undecided);
            undecided |= unsigned{is_undecided} << i;
          }
        }
        // No gap divides them. What is written behind the block, the next one
        // overwrites.
        uint32_t* codes = tile + PlaceOf(first);
        const int others = part.first - first;  // Of the block before.
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i >= others) codes[i] = k[i];
        }
        for (int i = 0; undecided >> i != 0; ++i) {
          const int e = first + i;
          if ((undecided >> i & 1) == 0 || e < part.first || e > part.last) continue;
          waiting.Add(e, decide);
        }
      }
      __syncwarp();
    }
    waiting.DecideAll(decide);
    __syncwarp();
    PackTile(tile, count, base, args.words + begin / base.digits);
    __syncwarp();
  }
}

// -- The mean -----------------------------------------------------------------------

// The place of a sum in shared memory: PlaceOf, for an e that is not negative.
__device__ inline int SumPlace(int e) { return e + (e >> 5); }

// Adds the levels of kWorkers workers in turn, from `worker` on, to the sums of a part
// of a tile. The levels of a block are copied to `few` if there are few.
template <bool kFew, int kWorkers>
__device__ void AddLevels(const MeanOfLevels& args, const Base& base, int64_t worker,
                          const uint32_t* words, int64_t words_per_worker,
                          int64_t block, const PartOfBlock& part, float* few,
                          float* tile) {
  const bool begins = worker == 0;
  const int64_t levels_per_worker = args.num_blocks * args.count;
  const float* all = args.levels + worker * levels_per_worker + block * args.count;
  if (kFew) {
    __syncwarp();
    for (int k = Lane(); k < args.count; k += kWarp) {
#pragma unroll
      for (int i = 0; i < kWorkers; ++i) {
        few[i * kFewLevels + k] = all[i * levels_per_worker + k];
      }
    }
    __syncwarp();
  }
  for (int word = part.first / base.digits + Lane(); word * base.digits <= part.last;
       word += kWarp) {
    Digits digits[kWorkers];
#pragma unroll
    for (int i = 0; i < kWorkers; ++i) {
      digits[i] = Digits(words[(worker + i) * words_per_worker + word], base);
    }
    for (int digit = base.digits - 1; digit >= 0; --digit) {
      const int e = word * base.digits + digit;
      const bool is_inside = part.first <= e && e <= part.last;
      float& sum = tile[SumPlace(e)];
      float total = 0;
      if (!begins && is_inside) total = sum;
#pragma unroll
      for (int i = 0; i < kWorkers; ++i) {
        const uint32_t code = digits[i].Next(base);
        const float level =
            kFew ? few[i * kFewLevels + code] : all[i * levels_per_worker + code];
        total = begins && i == 0 ? level : __fadd_rn(total, level);
      }
      if (is_inside) sum = total;
    }
  }
}

template <bool kFew>
__global__ void __launch_bounds__(kThreads)
    MeanOfLevelsKernel(MeanOfLevels args, Base base, int64_t words_per_worker) {
  __shared__ float tiles[kWarpsPerBlock][kTilePlaces];
  __shared__ float few_levels[kWarpsPerBlock][4 * kFewLevels];
  float *tile = tiles[WarpInBlock()], *few = few_levels[WarpInBlock()];
  const float workers = static_cast<float>(args.num_workers);
  // To multiply by the inverse of a power of two rounds as the division does.
  const bool is_power = (args.num_workers & (args.num_workers - 1)) == 0;
  const float inverse = __fdiv_rn(1, workers);
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    const uint32_t* words = args.words + begin / base.digits;
    for (int64_t block = blocks.first; block <= blocks.last; ++block) {
      const PartOfBlock part(args.row_splits, block, begin, count);
      for (int64_t worker = 0; worker < args.num_workers;) {
        const int64_t left = args.num_workers - worker;
        const auto add = [&](auto number) {
          AddLevels<kFew, number.value>(args, base, worker, words, words_per_worker,
                                        block, part, few, tile);
          worker += number.value;
        };
        if (left >= 4) {
          add(std::integral_constant<int, 4>());
        } else if (left >= 2) {
          add(std::integral_constant<int, 2>());
        } else {
          add(std::integral_constant<int, 1>());
        }
      }
    }
    __syncwarp();
    for (int e = Lane(); e < count; e += kWarp) {
      const float total = tile[SumPlace(e)];
      args.values.whole[begin + e] =
          is_power ? __fmul_rn(total, inverse) : __fdiv_rn(total, workers);
    }
    __syncwarp();
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackLevels& args) {
  const Base base(args.stream == nullptr ? args.count - 1 : args.count);
  return Launch(
      gpu, CeilDiv(args.size, base.TileElements()),
      args.count <= kFewLevels ? PackLevelsKernel<true> : PackLevelsKernel<false>, args,
      base);
}

const char* Run(const Gpu& gpu, const MeanOfLevels& args) {
  const Base base(args.count);
  return Launch(
      gpu, CeilDiv(args.size, base.TileElements()),
      args.count <= kFewLevels ? MeanOfLevelsKernel<true> : MeanOfLevelsKernel<false>,
      args, base, WordsFor(args.size, args.count));
}

}  // namespace tfgradcomp
