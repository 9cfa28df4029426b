// Signs kept at random.

#include "random.h"

namespace tfgradcomp {
namespace {

// A warp takes tiles of a few words per lane, so that all lanes draw the same number of
// blocks of upper bits. A tile has parts of one word per lane: in shared memory, the
// word's elements are five float4, which a quarter of a warp reads without bank
// conflicts.
constexpr int kDigits = tfgradcomp_format::kTernaryDigits, kQuads = kDigits / 4;
constexpr int kParts = 4, kPart = kWarp * kDigits, kTile = kParts * kPart;
static_assert(kTile / 16 % kWarp == 0, "Some lanes would draw more than others.");

struct Tile {
  float4 x[kPart / 4];
  uint32_t upper[kTile / 4];
  uint32_t words[kTile / kDigits];
  Waiting waiting;
};

__device__ inline Comparison ComparisonOf(float x, float limit, float scale) {
  const float magnitude = fabsf(x);
  return {scale, limit < magnitude ? limit : magnitude};
}

// Adds the element to the words, if it is kept.
__device__ inline void Decide(const PackTernary& args, const TileBlocks& blocks,
                              int64_t begin, int e, uint32_t* words) {
  const float x = args.x.whole[begin + e];
  const int64_t block = blocks.Of(begin + e);
  const RandomStream stream = ReadStream(args.stream);
  if (!ComparisonOf(x, args.limit[block], args.scale[block])
           .Holds(tfgradcomp_format::Uniform(stream, begin + e))) {
    return;
  }
  uint32_t power = 1;
  for (int i = 0; i < e % kDigits; ++i) power *= 3;
  atomicAdd(words + e / kDigits, BitsOf(x) >> 31 ? 0 - power : power);
}

__global__ void __launch_bounds__(kThreads) PackTernaryKernel(PackTernary args) {
  __shared__ Tile tiles[kWarpsPerBlock];
  Tile& tile = tiles[WarpInBlock()];
  const RandomStream stream = ReadStream(args.stream);
  for (int64_t t = FirstTile(); t * kTile < args.size; t += TileStride()) {
    const int64_t begin = t * kTile, left = args.size - begin;
    const int count = left < kTile ? static_cast<int>(left) : kTile;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    const auto decide = [&](int e) { Decide(args, blocks, begin, e, tile.words); };
    tile.waiting.Clear();
    for (int word = Lane(); word < kTile / kDigits; word += kWarp) tile.words[word] = 0;
    DrawUpper(stream, begin, count, tile.upper);
    float limit = args.limit[blocks.first], scale = args.scale[blocks.first];
    for (int part = 0; part < count; part += kPart) {
      float* const parts = &tile.x->x;
#pragma unroll
      for (int e = Lane(); e < kPart; e += kWarp) {
        parts[e] = part + e < count ? args.x.whole[begin + part + e] : 0;
      }
      __syncwarp();
      const int word_begin = part + Lane() * kDigits;
      uint32_t word = 0;
      for (int quad = kQuads - 1; quad >= 0; --quad) {
        const int e = word_begin + quad * 4;
        if (e >= count) continue;
        const float4 loaded = tile.x[(e - part) / 4];
        const float x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        const uint32_t upper = tile.upper[e / 4];
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          if (e + i >= count) continue;
          if (blocks.first != blocks.last) {
            const int64_t block = blocks.Of(begin + e + i);
            limit = args.limit[block];
            scale = args.scale[block];
          }
          bool undecided;
          const bool kept = ComparisonOf(x[i], limit, scale)
                                .Holds(upper >> (8 * i) & 0xFF, &undecided);
          if (undecided) tile.waiting.Add(e + i, decide);
          word = word * 3 + (kept ? 2 - 2 * (BitsOf(x[i]) >> 31) : 1);
        }
      }
      // Not a store: some of its elements may have been decided already.
      atomicAdd(tile.words + word_begin / kDigits, word);
      __syncwarp();
    }
    tile.waiting.DecideAll(decide);
    __syncwarp();
    for (int word = Lane(); word * kDigits < count; word += kWarp) {
      args.words[begin / kDigits + word] = tile.words[word];
    }
    __syncwarp();
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackTernary& args) {
  return Launch(gpu, CeilDiv(args.size, kTile), PackTernaryKernel, args);
}

}  // namespace tfgradcomp
