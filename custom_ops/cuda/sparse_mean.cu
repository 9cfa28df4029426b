// The mean of sparse words.

#include "block_sums.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::FactorOf;
using tfgradcomp_format::IndexOf;
using tfgradcomp_format::kIndexMask;
using tfgradcomp_format::kNothing;

constexpr int kSparseTile = 1024;

// The number of a row's words that come before element `begin`.
__device__ inline int64_t WordsBefore(const uint32_t* words, int64_t num_words,
                                      int64_t begin) {
  int64_t low = 0, high = num_words;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (IndexOf(words[middle]) < begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Adds the words of a worker, of which the first ones lie in a tile of `count`
// elements. Returns the number of these.
template <typename ScaleOf>
__device__ int64_t AddWords(const uint32_t* words, int64_t num_words, uint32_t begin,
                            uint32_t count, const ScaleOf& scale_of, float* tile) {
  constexpr int kAtOnce = 4, kWords = kAtOnce * kWarp;
  const uint32_t* from = words + Lane();
  for (int64_t left = num_words - Lane();; left -= kWords, from += kWords) {
    uint32_t some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      some[i] = i * kWarp < left ? from[i * kWarp] : kNothing;
    }
    // That of a word before the tile is large. It is out of order: the result is
    // undefined.
    const auto place = [&](int i) { return (some[i] & kIndexMask) - begin; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (place(i) >= count) continue;
      float& sum = tile[place(i)];
      sum = __fadd_rn(sum, __fmul_rn(scale_of(begin + place(i)), FactorOf(some[i])));
    }
    const bool inside = place(kAtOnce - 1) < count;
    if (__shfl_sync(kAllLanes, inside, kWarp - 1)) continue;
    int64_t added = from - Lane() - words;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) added += CountLanes(place(i) < count);
    return added;
  }
}

// A warp takes `run` tiles that follow each other, so that it has to look for the words
// of the first one only.
__global__ void __launch_bounds__(kThreads)
    MeanOfSparseKernel(MeanOfSparse args, int64_t run) {
  __shared__ float tiles[kWarpsPerBlock][kSparseTile];
  float* tile = tiles[WarpInBlock()];
  const int64_t all = CeilDiv(args.size, kSparseTile);
  for (int64_t r = FirstTile(); r * run < all; r += TileStride()) {
    int64_t next = 0;  // The first word of worker Lane() of 32.
    for (int64_t t = r * run; t < (r + 1) * run && t < all; ++t) {
      const int64_t begin = t * kSparseTile;
      const int64_t left = args.size - begin;
      const int64_t end = left < kSparseTile ? args.size : begin + kSparseTile;
      const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
      for (int e = Lane(); e < kSparseTile; e += kWarp) tile[e] = 0;
      for (int64_t worker = 0; worker < args.num_workers; ++worker) {
        const int lane = static_cast<int>(worker % kWarp);
        if (lane == 0 && (t == r * run || args.num_workers > kWarp)) {
          const int64_t own = worker + Lane();
          if (own < args.num_workers) {
            next =
                WordsBefore(args.words + own * args.num_words, args.num_words, begin);
          }
        }
        __syncwarp();  // Another lane may have added to the same element.
        const int64_t at = __shfl_sync(kAllLanes, next, lane);
        const uint32_t* words = args.words + worker * args.num_words + at;
        const float* scale = args.scale + worker * args.num_blocks;
        const auto add = [&](const auto& scale_of) {
          return AddWords(words, args.num_words - at, static_cast<uint32_t>(begin),
                          static_cast<uint32_t>(end - begin), scale_of, tile);
        };
        int64_t added;
        if (blocks.first == blocks.last) {
          const float one = scale[blocks.first];
          added = add([one](int64_t) { return one; });
        } else {
          added = add([&](int64_t j) { return scale[blocks.Of(j)]; });
        }
        if (Lane() == lane) next += added;
      }
      WriteMeans(tile, begin, end, args.num_workers, args.values.whole);
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const MeanOfSparse& args) {
  const int64_t tiles = CeilDiv(args.size, kSparseTile);
  // A warp has several tiles only if there is work for many warps.
  const int64_t run = tiles / (4 * kEnoughWarps) + 1;
  return Launch(gpu, CeilDiv(tiles, run), MeanOfSparseKernel, args, run);
}

}  // namespace tfgradcomp
