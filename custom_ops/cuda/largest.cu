// The largest elements of chunks, and their mean.

#include "../chunks.h"
#include "elements.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::ChunkFormat;
using tfgradcomp_format::MagnitudeParts;

// A thread block packs a chunk.
__global__ void __launch_bounds__(kManyThreads) PackLargestKernel(PackLargest args) {
  __shared__ uint32_t keys[kKept];
  const ChunkFormat format(args);
  for (int64_t block = blockIdx.x; block < args.num_blocks; block += gridDim.x) {
    const float* x = args.x.whole + args.row_splits[block];
    const int64_t size = args.row_splits[block + 1] - args.row_splits[block];
    const Elements elements(x, size, true, keys);
    const bool is_finite = elements.fixed_point.exponent != kInfinite;
    if (!is_finite) {
      const int64_t nonfinite = elements.Sum(
          [](uint32_t key) { return ExponentOf(NumberOf(key)) == kInfinite; });
      if (WarpInBlock() == 0) AddCount(args.nonfinite, nonfinite);
    }
    const int64_t count = format.Share(size);
    // Of the elements with this key, only the first are sent.
    const uint32_t least = elements.Select(count, elements.smallest, elements.largest);
    const int64_t equal =
        count - elements.Sum([&](uint32_t key) { return key > least; });
    const auto fixed = [&](uint32_t key) -> int64_t {
      return is_finite ? elements.fixed_point(key) : 0;
    };

    MagnitudeParts parts;
    for (int splits = 0; splits < args.bits; ++splits) {
      for (int part = 1 << splits; part < 2 << splits; ++part) {
        // The sum over the elements sent that are in the part.
        const auto sum = [&](const auto& value) {
          const auto own = [&](uint32_t key) -> int64_t {
            return parts.Of(fixed(key), splits) == part ? value(key) : 0;
          };
          return equal * own(least) + elements.Sum([&](uint32_t key) -> int64_t {
            return key > least ? own(key) : 0;
          });
        };
        const int64_t number = sum([](uint32_t) { return 1; });
        const int64_t total = sum(fixed);
        parts.number[part] = number;
        parts.total[part] = total;
      }
    }
    const int part_of_first = static_cast<int>(format.levels);
    for (int level = threadIdx.x; level < format.levels; level += blockDim.x) {
      const int part = parts.Filled(part_of_first + level);
      args.levels[block * format.levels + level] =
          elements.fixed_point.Mean(parts.total[part], parts.number[part]);
    }

    // The numbers of larger and, above bit 32, of equal elements before these.
    int64_t before = 0;
    for (int64_t first = 0; first < size; first += blockDim.x) {
      const int64_t i = first + threadIdx.x;
      const uint32_t key = i < size ? elements.At(i) : 0;
      const int64_t own = key > least ? 1 : int64_t{key == least} << 32;
      const int64_t numbers = before + SumBefore(own);
      before += CombineThreads(own, Plus());
      const int64_t equal_before = numbers >> 32;
      if (key < least || (key == least && equal_before >= equal)) continue;
      const int64_t rank =
          (numbers & 0xFFFFFFFF) + (equal_before < equal ? equal_before : equal);
      const int level = parts.Of(fixed(key), args.bits - 1) - part_of_first;
      const uint32_t minus = BitsOf(x[i]) >> 31;
      format.Write(rank, i, level | minus << (args.bits - 1),
                   [&](int64_t word, uint32_t bits) {
                     atomicOr(&args.words[block * format.words + word], bits);
                   });
    }
  }
}

constexpr int kTileOfLargest = 1024;

__global__ void __launch_bounds__(kThreads) MeanOfLargestKernel(MeanOfLargest args) {
  __shared__ float tiles[kWarpsPerBlock][kTileOfLargest];
  float* tile = tiles[WarpInBlock()];
  const ChunkFormat format(args);
  for (int64_t t = FirstTile(); t * kTileOfLargest < args.size; t += TileStride()) {
    const int64_t begin = t * kTileOfLargest;
    const int64_t left = args.size - begin;
    const int64_t end = left < kTileOfLargest ? args.size : begin + kTileOfLargest;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
    for (int e = Lane(); e < kTileOfLargest; e += kWarp) tile[e] = 0;
    for (int64_t worker = 0; worker < args.num_workers; ++worker) {
      __syncwarp();  // Another lane may have added to the same element.
      for (int64_t block = blocks.first; block <= blocks.last; ++block) {
        const int64_t row = worker * args.num_blocks + block;
        const uint32_t* words = args.words + row * format.words;
        const float* levels = args.levels + row * format.levels;
        int64_t before = 0;  // The number of elements before these.
        for (int64_t at = 0; at < format.unary; at += kWarp) {
          const uint32_t upper = words[at / kWarp];
          const int64_t rank = before + __popc(upper & ((1u << Lane()) - 1));
          before += __popc(upper);
          if ((upper >> Lane() & 1) == 0 || at + Lane() >= format.unary) continue;
          if (rank >= format.k) continue;
          const int64_t j =
              args.row_splits[block] + format.PositionOf(words, at + Lane(), rank);
          // Words that no sender writes may have a position twice, or beyond the block:
          // the result is undefined.
          if (j < begin || j >= end) continue;
          float& sum = tile[j - begin];
          sum = __fadd_rn(sum, format.ValueOf(words, levels, rank));
        }
      }
    }
    WriteMeans(tile, begin, end, args.num_workers, args.values.whole);
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackLargest& args) {
  const char* error = SetZero(gpu, args.nonfinite);
  const int64_t words = args.num_blocks * ChunkFormat(args).words;
  if (error == nullptr) error = SetZero(gpu, args.words, words);
  if (error != nullptr) return error;
  const bool few = args.size <= kKept * args.num_blocks;
  return LaunchBlocks(gpu, args.num_blocks, few ? kFewThreads : kManyThreads,
                      PackLargestKernel, args);
}

const char* Run(const Gpu& gpu, const MeanOfLargest& args) {
  return Launch(gpu, CeilDiv(args.size, kTileOfLargest), MeanOfLargestKernel, args);
}

}  // namespace tfgradcomp
