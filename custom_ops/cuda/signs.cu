// Packing signs, and their mean.

#include "signs.h"

namespace tfgradcomp {
namespace {

__global__ void __launch_bounds__(kThreads) PackSignsKernel(PackSigns args) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk + Lane();
    float x[kSteps];
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      const int64_t j = begin + m * kWarp;
      x[m] = j < args.size ? args.x.whole[j] : 0;
    }
    SignWords words;
    int nonfinite = 0;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      words.Add(m, begin + m * kWarp < args.size, x[m]);
      nonfinite += CountLanes(IsNonfinite(x[m]));
    }
    AddCount(args.nonfinite, nonfinite);
    words.Store(chunk, args.size, args.stream, args.words);
  }
}

__global__ void __launch_bounds__(kThreads)
    PackMomentumSignsKernel(PackMomentumSigns args) {
  const bool warming_up = *args.warming_up;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk + Lane();
    float x[kSteps], momentum[kSteps];
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      const int64_t j = begin + m * kWarp;
      x[m] = j < args.size ? args.x.whole[j] : 0;
      momentum[m] = j < args.size ? args.momentum[j] : 0;
    }
    SignWords words;
    int nonfinite = 0;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      const int64_t j = begin + m * kWarp;
      const float moved = __fadd_rn(__fmul_rn(args.beta, momentum[m]),
                                    __fmul_rn(args.one_minus_beta, x[m]));
      if (j < args.size) args.new_momentum[j] = moved;
      words.Add(m, j < args.size, warming_up ? x[m] : moved);
      nonfinite += CountLanes(IsNonfinite(moved));
    }
    AddCount(args.nonfinite, nonfinite);
    words.Store(chunk, args.size, args.stream, args.words);
  }
}

__global__ void __launch_bounds__(kThreads)
    MeanOfSignsKernel(MeanOfSigns args, int64_t words_per_worker) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
#pragma unroll 4
    for (int64_t j = begin + Lane(); j < end; j += kWarp) {
      args.values.whole[j] =
          MeanSign(args.words, words_per_worker, args.scale, args.num_blocks,
                   args.num_workers, j, blocks.Of(j));
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackSigns& args) {
  const char* error = SetZero(gpu, args.nonfinite);
  if (error != nullptr) return error;
  return Launch(gpu, CeilDiv(args.size, kChunk), PackSignsKernel, args);
}

const char* Run(const Gpu& gpu, const PackMomentumSigns& args) {
  const char* error = SetZero(gpu, args.nonfinite);
  if (error != nullptr) return error;
  return Launch(gpu, CeilDiv(args.size, kChunk), PackMomentumSignsKernel, args);
}

const char* Run(const Gpu& gpu, const MeanOfSigns& args) {
  return Launch(gpu, CeilDiv(args.size, kChunk), MeanOfSignsKernel, args,
                tfgradcomp_format::WordsFor(args.size, 2));
}

}  // namespace tfgradcomp
