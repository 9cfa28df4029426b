// Signs kept at random.

#include "fours.h"
#include "random.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::FloatOf;

// A warp takes tiles so large that most lanes have a comparison to decide by the lower
// bits, and so that all lanes draw the same number of blocks of upper bits.
constexpr int kDigits = tfgradcomp_format::kTernaryDigits;
constexpr int kTile = 4 * kWarp * kDigits, kQuads = kTile / 4;
static_assert(kTile / 16 % kWarp == 0, "Some lanes would draw more than others.");

// A float32 from here on ends in the bits of an integer that was added to it.
constexpr float kExact = 1 << 23;

// Quads that a lane loads at once.
constexpr int kAtOnce = 4;
static_assert(kQuads % (kAtOnce * kWarp) == 0 && kQuads <= 32 * kWarp, "");

// In shared memory. A quad is four digits of neighbouring elements as one number. At
// first, it has a bit for each undecided element as well, from kUndecided on.
constexpr int kUndecided = 8;
struct Tile {
  uint32_t upper[kQuads];
  uint32_t quads[kQuads];
  Waiting waiting;
};

__device__ inline Comparison ComparisonOf(float x, float limit, float scale) {
  const float magnitude = fabsf(x);
  return {scale, limit < magnitude ? limit : magnitude};
}

// Adds the element to its quad, if it is kept.
__device__ inline void Decide(const PackTernary& args, const LaneBlock& blocks,
                              int64_t begin, int e, Tile& tile) {
  const float x = args.x.whole[begin + e];
  const int64_t block = blocks.Of(e);
  const uint32_t upper = tile.upper[e / 4] >> (8 * (e % 4)) & 0xFF;
  if (!ComparisonOf(x, args.limit[block], args.scale[block])
           .Holds(UniformOf(upper, ReadStream(args.stream), begin + e))) {
    return;
  }
  uint32_t power = 1;
  for (int i = 0; i < e % 4; ++i) power *= 3;
  atomicAdd(tile.quads + e / 4, BitsOf(x) >> 31 ? 0 - power : power);
}

__global__ void __launch_bounds__(kThreads) PackTernaryKernel(PackTernary args) {
  __shared__ Tile tiles[kWarpsPerBlock];
  Tile& tile = tiles[WarpInBlock()];
  const RandomStream stream = ReadStream(args.stream);
  for (int64_t t = FirstTile(); t * kTile < args.size; t += TileStride()) {
    const int64_t begin = t * kTile, left = args.size - begin;
    const int count = left < kTile ? static_cast<int>(left) : kTile;
    const LaneBlock first(args.row_splits, args.num_blocks, begin, count);
    const auto decide = [&](int e) { Decide(args, first, begin, e, tile); };
    tile.waiting.Clear();
    DrawUpper(stream, begin, count, tile.upper);
    __syncwarp();
    const float* x = args.x.whole + begin;
    const bool aligned = IsAligned(x);
    LaneBlock block = first;
    float limit = 0;
    UpperComparison comparison(0);
    uint32_t some_wait = 0, mark = 1;  // A bit for each of the lane's quads.
    for (int batch = Lane(); batch < kQuads; batch += kAtOnce * kWarp) {
      Four<float> loaded[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int e = 4 * (batch + k * kWarp);
        if (e + 4 <= count) loaded[k] = LoadFour(x, e, aligned);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int quad = batch + k * kWarp, e = 4 * quad;
        if (e >= count) break;
        if (block.Move(e)) {
          limit = args.limit[block.index];
          comparison = UpperComparison(args.scale[block.index]);
        }
        uint32_t digits = 0, undecided = 0;
        if (block.HasFour(e)) {
          const uint32_t upper = tile.upper[quad];
          float sum = kExact + 1 + 3 + 9 + 27;
          constexpr float kPowers[] = {1, 3, 9, 27};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float its = loaded[k].at[i];
            bool waits;
            const bool kept =
                comparison.Holds(upper, i, ComparisonOf(its, limit, 0).value, &waits);
            if (waits) undecided |= 1 << i;
            const uint32_t sign = BitsOf(its) & 0x80000000;
            sum += kept ? FloatOf(sign | BitsOf(kPowers[i])) : 0;
          }
          digits = BitsOf(sum) & 0xFF;
        } else {  // All wait.
          uint32_t power = 1;
#pragma unroll 1
          for (int i = 0; i < 4 && e + i < count; ++i, power *= 3) {
            undecided |= 1 << i;
            digits += power;
          }
        }
        tile.quads[quad] = digits | undecided << kUndecided;
        if (undecided != 0) some_wait |= mark;
        mark <<= 1;
      }
    }
    while (some_wait != 0) {
      const int last = 31 - __clz(static_cast<int>(some_wait));
      some_wait ^= 1u << last;
      const int quad = last * kWarp + Lane();
      uint32_t undecided = tile.quads[quad] >> kUndecided;
      tile.quads[quad] &= (1 << kUndecided) - 1;
      for (int e = 4 * quad; undecided != 0; ++e, undecided >>= 1) {
        if (undecided & 1) tile.waiting.Add(e, decide);
      }
    }
    __syncwarp();
    tile.waiting.DecideAll(decide);
    __syncwarp();
    for (int word = Lane(); word * kDigits < count; word += kWarp) {
      uint32_t packed = 0;
#pragma unroll
      for (int i = kDigits / 4 - 1; i >= 0; --i) {
        const int quad = word * (kDigits / 4) + i;
        packed = packed * 81 + (4 * quad < count ? tile.quads[quad] : 0);
      }
      args.words[begin / kDigits + word] = packed;
    }
    __syncwarp();
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackTernary& args) {
  return Launch(gpu, CeilDiv(args.size, kTile), PackTernaryKernel, args);
}

}  // namespace tfgradcomp
