// Levels of blocks: rounded to and averaged.

#include "digits.h"

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
