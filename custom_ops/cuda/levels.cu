// Rounding to the levels of blocks, and their mean.

#include "digits.h"
#include "random.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::WordsFor;

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

// The number k of inner levels that are at most x, and whether x is rounded up.
struct LevelBelow {
  __device__ LevelBelow(const PackLevels& args, int64_t block, float x) {
    const float* levels = args.levels + block * args.count;
    k = InnerLevelsUpTo(levels, args.count, x);
    if (args.stream == nullptr) return;
    goes_up = {__fsub_rn(levels[k + 1], levels[k]), __fsub_rn(x, levels[k])};
  }
  int64_t k;
  Comparison goes_up;
};

__global__ void __launch_bounds__(kThreads)
    PackLevelsKernel(PackLevels args, Base base) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  __shared__ uint32_t uppers[kWarpsPerBlock][kTile / 4];
  __shared__ Waiting waitings[kWarpsPerBlock];
  uint32_t *tile = tiles[WarpInBlock()], *upper = uppers[WarpInBlock()];
  Waiting& waiting = waitings[WarpInBlock()];
  const bool draws = args.stream != nullptr;
  const RandomStream stream = draws ? ReadStream(args.stream) : RandomStream{};
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    const auto decide = [&](int e) {
      const int64_t j = begin + e;
      const LevelBelow below(args, blocks.Of(j), args.x.whole[j]);
      const float uniform = tfgradcomp_format::Uniform(stream, j);
      tile[PlaceOf(e)] = static_cast<uint32_t>(below.k) + below.goes_up.Holds(uniform);
    };
    waiting.Clear();
    if (draws) DrawUpper(stream, begin, count, upper);
    __syncwarp();
#pragma unroll 4
    for (int e = Lane(); e < count; e += kWarp) {
      const LevelBelow below(args, blocks.Of(begin + e), args.x.whole[begin + e]);
      bool up = false, undecided = false;
      if (draws)
        up = below.goes_up.Holds(upper[e / 4] >> (8 * (e % 4)) & 0xFF, &undecided);
      tile[PlaceOf(e)] = static_cast<uint32_t>(below.k) + up;
      if (undecided) waiting.Add(e, decide);
    }
    __syncwarp();
    waiting.DecideAll(decide);
    __syncwarp();
    PackTile(tile, count, base, args.words + begin / base.digits);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads)
    MeanOfLevelsKernel(MeanOfLevels args, Base base, int64_t words_per_worker) {
  constexpr int kWorkersAtOnce = 4;
  __shared__ float tiles[kWarpsPerBlock][kTilePlaces];
  float* tile = tiles[WarpInBlock()];
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    const uint32_t* words = args.words + begin / base.digits;
    const int64_t levels_per_worker = args.num_blocks * args.count;
    for (int word = Lane(); word * base.digits < count; word += kWarp) {
      for (int64_t worker = 0; worker < args.num_workers; worker += kWorkersAtOnce) {
        Digits digits[kWorkersAtOnce];
#pragma unroll
        for (int i = 0; i < kWorkersAtOnce; ++i) {
          if (worker + i >= args.num_workers) break;
          digits[i] = Digits(words[(worker + i) * words_per_worker + word], base);
        }
        const float* levels = args.levels + worker * levels_per_worker;
        for (int digit = base.digits - 1; digit >= 0; --digit) {
          const int e = word * base.digits + digit;
          const int64_t place = e < count ? blocks.Of(begin + e) * args.count : 0;
          float total = worker == 0 || e >= count ? 0 : tile[PlaceOf(e)];
#pragma unroll
          for (int i = 0; i < kWorkersAtOnce; ++i) {
            if (worker + i >= args.num_workers) break;
            const uint32_t code = digits[i].Next(base);
            const float level = levels[i * levels_per_worker + place + code];
            total = worker + i == 0 ? level : __fadd_rn(total, level);
          }
          if (e < count) tile[PlaceOf(e)] = total;
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
