// Packing, unpacking and adding codes of any base.

#include "digits.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::WordsFor;

__global__ void __launch_bounds__(kThreads) PackCodesKernel(PackCodes args, Base base) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
#pragma unroll 8
    for (int e = Lane(); e < count; e += kWarp) {
      tile[PlaceOf(e)] = static_cast<uint32_t>(args.codes[begin + e]);
    }
    __syncwarp();
    PackTile(tile, count, base, args.words + begin / base.digits);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads)
    UnpackCodesKernel(UnpackCodes args, Base base, int64_t words_per_row) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  const int step = base.TileElements();
  const int64_t tiles_per_row = (args.size + step - 1) / step;
  for (int64_t t = FirstTile(); t < args.rows * tiles_per_row; t += TileStride()) {
    const int64_t row = t / tiles_per_row;
    const int64_t begin = (t - row * tiles_per_row) * step;
    const int count = CountOfTile(args.size, begin, step);
    SumCodesOfTile<1>(args.words + row * words_per_row, 1, words_per_row, base, begin,
                      count, tile);
    __syncwarp();
    int32_t* codes = args.codes + row * args.size + begin;
    for (int e = Lane(); e < count; e += kWarp) {
      codes[e] = static_cast<int32_t>(tile[PlaceOf(e)]);
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads)
    SumCodesKernel(SumCodes args, Base base, Base sum_base, int64_t words_per_worker) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  const int step = sum_base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    SumCodesOfTile<4>(args.words, args.num_workers, words_per_worker, base, begin,
                      count, tile);
    __syncwarp();
    PackTile(tile, count, sum_base, args.sum + begin / sum_base.digits);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads)
    SumLevelsKernel(SumLevels args, Base base, int64_t words_per_worker) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  const int step = base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    SumCodesOfTile<4>(args.words, args.num_workers, words_per_worker, base, begin,
                      count, tile);
    __syncwarp();
    float scale = args.scale[blocks.first];
#pragma unroll 4
    for (int e = Lane(); e < count; e += kWarp) {
      const int64_t j = begin + e;
      if (blocks.first != blocks.last) scale = args.scale[blocks.Of(j)];
      // Modulo 2^32: only the result has to be below 2^31.
      const uint32_t level = static_cast<uint32_t>(args.step) * tile[PlaceOf(e)] -
                             static_cast<uint32_t>(args.zero);
      args.values.whole[j] =
          __fmul_rn(scale, static_cast<float>(static_cast<int32_t>(level)));
    }
    __syncwarp();
  }
}

// Tiles of a word a lane. The word's elements are five blocks of Philox, and in shared
// memory five float4 that no bank serves twice in a quarter of a warp.
constexpr int kQuads = tfgradcomp_format::kTernaryDigits / 4;
constexpr int kTernaryTile = kWarp * tfgradcomp_format::kTernaryDigits;

__global__ void __launch_bounds__(kThreads) PackTernaryKernel(PackTernary args) {
  __shared__ float4 tiles[kWarpsPerBlock][kTernaryTile / 4];
  float4* quads = tiles[WarpInBlock()];
  float* tile = &quads->x;
  const RandomStream stream = ReadStream(args.stream);
  for (int64_t t = FirstTile(); t * kTernaryTile < args.size; t += TileStride()) {
    const int64_t begin = t * kTernaryTile;
    const int count = CountOfTile(args.size, begin, kTernaryTile);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
#pragma unroll
    for (int e = Lane(); e < kTernaryTile; e += kWarp) {
      tile[e] = e < count ? args.x.whole[begin + e] : 0;
    }
    __syncwarp();
    float limit = args.limit[blocks.first], scale = args.scale[blocks.first];
    const int word_begin = Lane() * kQuads * 4;
    uint32_t word = 0;
    for (int quad = kQuads - 1; quad >= 0; --quad) {
      const int e = word_begin + quad * 4;
      if (e >= count) continue;
      const float4 loaded = quads[e / 4];
      const float x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      uint32_t random[4];
      tfgradcomp_format::Philox(stream, static_cast<uint64_t>(begin + e) / 4, random);
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        if (e + i >= count) continue;
        if (blocks.first != blocks.last) {
          const int64_t block = blocks.Of(begin + e + i);
          limit = args.limit[block];
          scale = args.scale[block];
        }
        const float magnitude = fabsf(x[i]);
        const float clipped = limit < magnitude ? limit : magnitude;
        const float uniform = tfgradcomp_format::Uniform(random[i]);
        const bool kept = __fmul_rn(uniform, scale) < clipped;
        word = word * 3 + (kept ? 2 - 2 * (BitsOf(x[i]) >> 31) : 1);
      }
    }
    if (word_begin < count) args.words[begin / (kQuads * 4) + Lane()] = word;
    __syncwarp();
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackCodes& args) {
  const Base base(args.base);
  return Launch(gpu, CeilDiv(args.size, base.TileElements()), PackCodesKernel, args,
                base);
}

const char* Run(const Gpu& gpu, const UnpackCodes& args) {
  const Base base(args.base);
  return Launch(gpu, args.rows * CeilDiv(args.size, base.TileElements()),
                UnpackCodesKernel, args, base, WordsFor(args.size, args.base));
}

const char* Run(const Gpu& gpu, const SumCodes& args) {
  const Base base(args.base), sum_base(args.sum_base);
  return Launch(gpu, CeilDiv(args.size, sum_base.TileElements()), SumCodesKernel, args,
                base, sum_base, WordsFor(args.size, args.base));
}

const char* Run(const Gpu& gpu, const SumLevels& args) {
  const Base base(args.base);
  return Launch(gpu, CeilDiv(args.size, base.TileElements()), SumLevelsKernel, args,
                base, WordsFor(args.size, args.base));
}

const char* Run(const Gpu& gpu, const PackTernary& args) {
  return Launch(gpu, CeilDiv(args.size, kTernaryTile), PackTernaryKernel, args);
}

}  // namespace tfgradcomp
