// Packing, unpacking and adding codes of any base.

#include "digits.h"
#include "quads.h"

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
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    for (int64_t row = 0; row < args.rows; ++row) {
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
}

template <uint32_t kBase>
__global__ void __launch_bounds__(kThreads)
    UnpackQuadsKernel(UnpackCodes args, int64_t words_per_row) {
  using Base = CommonBase<kBase>;
  const uint32_t base = static_cast<uint32_t>(args.base);
  __shared__ uint32_t tiles[kWarpsPerBlock][Base::kPlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  for (int64_t t = FirstTile(); t * Base::kElements < args.size; t += TileStride()) {
    const int64_t word = t * Base::kAllWords, begin = t * Base::kElements;
    const int count = CountOfTile(args.size, begin, Base::kElements);
    for (int64_t row = 0; row < args.rows; ++row) {
      SumToShared<kBase, 1>(args.words + row * words_per_row + word, 1, words_per_row,
                            words_per_row - word, base, tile);
      __syncwarp();
      int32_t* codes = args.codes + row * args.size + begin;
      const bool aligned = IsAligned(codes);
#pragma unroll
      for (int quad = Lane(); quad < Base::kAllQuads; quad += kWarp) {
        const int e = 4 * quad;
        uint32_t packed = tile[Base::PlaceOf(quad)];
        if (aligned && e + 4 <= count) {
          Four<int32_t> four;
#pragma unroll
          for (int i = 0; i < 4; ++i) four.at[i] = packed >> (8 * i) & 0xFF;
          StoreFour(codes, e, four);
          continue;
        }
#pragma unroll 1
        for (int i = e; i < e + 4 && i < count; ++i, packed >>= 8) {
          codes[i] = packed & 0xFF;
        }
      }
      __syncwarp();
    }
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

// Sums of a common base. A tile is in bytes, from the first element of a word of the
// summands, perhaps `before` the first element of a word of the sum.
template <uint32_t kBase>
struct SumTile {
  using Base = CommonBase<kBase>;
  static constexpr int kParts = 2047 / Base::kElements + 1;
  static constexpr int kElements = kParts * Base::kElements;

  // The elements of a tile that are whole words of the sum.
  static int Step(int sum_digits) {
    const int step = kElements / sum_digits * sum_digits;
    if (step % Base::kDigits == 0) return step;  // There is never any before.
    return (kElements - Base::kDigits + 1) / sum_digits * sum_digits;
  }

  __device__ uint32_t At(int e) const {
    const int place = 4 * Base::PlaceOf(e / 4) + e % 4;
    return reinterpret_cast<const uint8_t*>(quads)[place];
  }

  uint32_t quads[kParts * Base::kPlaces];
};

template <uint32_t kBase>
__global__ void __launch_bounds__(kThreads)
    SumQuadsKernel(SumCodes args, Base sum_base, int step, int64_t words_per_worker) {
  using Base = CommonBase<kBase>;
  const uint32_t base = static_cast<uint32_t>(args.base);
  __shared__ SumTile<kBase> tiles[kWarpsPerBlock];
  SumTile<kBase>& tile = tiles[WarpInBlock()];
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step, first = begin / Base::kDigits;
    const int before = static_cast<int>(begin - first * Base::kDigits);
    const int count = CountOfTile(args.size, begin, step);
    for (int part = 0; part * Base::kElements < before + count; ++part) {
      const int64_t word = first + part * Base::kAllWords;
      SumToShared<kBase, 4>(args.words + word, static_cast<int>(args.num_workers),
                            words_per_worker, words_per_worker - word, base,
                            tile.quads + part * Base::kPlaces);
    }
    __syncwarp();
    uint32_t* sum = args.sum + begin / sum_base.digits;
    for (int word = Lane(); word * sum_base.digits < count; word += kWarp) {
      const int from = word * sum_base.digits;
      const int to = from + sum_base.digits < count ? from + sum_base.digits : count;
      uint32_t packed = 0;
#pragma unroll 4
      for (int e = before + to - 1; e >= before + from; --e) {
        packed = packed * sum_base.value + tile.At(e);
      }
      sum[word] = packed;
    }
    __syncwarp();
  }
}

// Modulo 2^32: only the result has to be below 2^31.
__device__ inline float Level(const SumLevels& args, float scale, uint32_t sum) {
  const uint32_t level =
      static_cast<uint32_t>(args.step) * sum - static_cast<uint32_t>(args.zero);
  return __fmul_rn(scale, static_cast<float>(static_cast<int32_t>(level)));
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
      args.values.whole[j] = Level(args, scale, tile[PlaceOf(e)]);
    }
    __syncwarp();
  }
}

// A tile has several parts, so that its block is not searched too often.
template <uint32_t kBase>
constexpr int kPartsOfTile = 2047 / CommonBase<kBase>::kElements + 1;

template <uint32_t kBase>
__global__ void __launch_bounds__(kThreads)
    SumLevelsOfQuadsKernel(SumLevels args, int64_t words_per_worker) {
  using Base = CommonBase<kBase>;
  const uint32_t base = static_cast<uint32_t>(args.base);
  constexpr int kElements = kPartsOfTile<kBase> * Base::kElements;
  __shared__ uint32_t tiles[kWarpsPerBlock][Base::kPlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  for (int64_t t = FirstTile(); t * kElements < args.size; t += TileStride()) {
    const int64_t begin = t * kElements;
    const int count = CountOfTile(args.size, begin, kElements);
    float* values = args.values.whole + begin;
    const bool aligned = IsAligned(values);
    LaneBlock block(args.row_splits, args.num_blocks, begin, count);
    float scale = 0;
    for (int part = 0; part < count; part += Base::kElements) {
      const int64_t word = (begin + part) / Base::kDigits;
      SumToShared<kBase, 4>(args.words + word, static_cast<int>(args.num_workers),
                            words_per_worker, words_per_worker - word, base, tile);
      __syncwarp();
#pragma unroll 1
      for (int quad = Lane(); quad < Base::kAllQuads; quad += kWarp) {
        const int e = part + 4 * quad;
        if (e >= count) break;
        if (block.Move(e)) scale = args.scale[block.index];
        uint32_t sums = tile[Base::PlaceOf(quad)];
        const bool has_four = block.HasFour(e);
        if (aligned && has_four) {
          Four<float> four;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            four.at[i] = Level(args, scale, sums >> (8 * i) & 0xFF);
          }
          StoreFour(values, e, four);
          continue;
        }
#pragma unroll 1
        for (int i = e; i < e + 4 && i < count; ++i, sums >>= 8) {
          const float its_scale = has_four ? scale : args.scale[block.Of(i)];
          values[i] = Level(args, its_scale, sums & 0xFF);
        }
      }
      __syncwarp();
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackCodes& args) {
  const Base base(args.base);
  return Launch(gpu, CeilDiv(args.size, base.TileElements()), PackCodesKernel, args,
                base);
}

const char* Run(const Gpu& gpu, const UnpackCodes& args) {
  const int64_t words = WordsFor(args.size, args.base);
  return ForBase(
      args.base,
      [&](auto base) {
        return Launch(gpu, CeilDiv(words, base.kAllWords),
                      UnpackQuadsKernel<base.kValue>, args, words);
      },
      [&] {
        const Base base(args.base);
        return Launch(gpu, CeilDiv(args.size, base.TileElements()), UnpackCodesKernel,
                      args, base, words);
      });
}

const char* Run(const Gpu& gpu, const SumCodes& args) {
  const int64_t words = WordsFor(args.size, args.base);
  const Base sum_base(args.sum_base);
  return ForBase(
      QuadsHold(args.num_workers, args.base) ? args.base : 0,
      [&](auto base) {
        const int step = SumTile<base.kValue>::Step(sum_base.digits);
        return Launch(gpu, CeilDiv(args.size, step), SumQuadsKernel<base.kValue>, args,
                      sum_base, step, words);
      },
      [&] {
        return Launch(gpu, CeilDiv(args.size, sum_base.TileElements()), SumCodesKernel,
                      args, Base(args.base), sum_base, words);
      });
}

const char* Run(const Gpu& gpu, const SumLevels& args) {
  const int64_t words = WordsFor(args.size, args.base);
  return ForBase(
      QuadsHold(args.num_workers, args.base) ? args.base : 0,
      [&](auto base) {
        return Launch(gpu, CeilDiv(words, base.kAllWords * kPartsOfTile<base.kValue>),
                      SumLevelsOfQuadsKernel<base.kValue>, args, words);
      },
      [&] {
        const Base base(args.base);
        return Launch(gpu, CeilDiv(args.size, base.TileElements()), SumLevelsKernel,
                      args, base, words);
      });
}

}  // namespace tfgradcomp
