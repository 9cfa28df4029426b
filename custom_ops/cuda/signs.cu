// Packing signs, and their mean.

#include "signs.h"

namespace tfgradcomp {
namespace {

// Adds the number of a chunk's elements that are infinite or NaN.
__device__ inline void CountNonfinite(const float x[kSteps], int64_t* total) {
  uint32_t nonfinite = 0;
#pragma unroll
  for (int m = 0; m < kSteps; ++m) {
    nonfinite |= static_cast<uint32_t>(IsNonfinite(x[m])) << m;
  }
  if (CountLanes(nonfinite != 0) == 0) return;
  int count = __popc(nonfinite);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    count += __shfl_xor_sync(kAllLanes, count, distance);
  }
  AddCount(total, count);
}

// Stores the words of a chunk's signs; with a stream, coins decide for zeros.
__device__ inline void StoreSigns(const float x[kSteps], int64_t begin, int count,
                                  const uint64_t* stream, uint32_t* words) {
  uint32_t minus = TransposeBits(MinusBits(x));
  if (stream != nullptr) {
    uint32_t zeros = 0;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) zeros |= static_cast<uint32_t>(IsZero(x[m])) << m;
    if (CountLanes(zeros != 0) != 0) {
      zeros = TransposeBits(zeros);
      if (zeros != 0)
        minus |= zeros & ~Coins(ReadStream(stream), begin / kWarp + Lane());
    }
  }
  StoreWord(~minus, begin, count, words);
}

__global__ void __launch_bounds__(kThreads) PackSignsKernel(PackSigns args) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float x[kSteps];
    LoadChunk(args.x.whole + begin, count, x);
    CountNonfinite(x, args.nonfinite);
    StoreSigns(x, begin, count, args.stream, args.words);
  }
}

__global__ void __launch_bounds__(kThreads)
    PackMomentumSignsKernel(PackMomentumSigns args) {
  const bool warming_up = *args.warming_up;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float x[kSteps], momentum[kSteps];
    LoadChunk(args.x.whole + begin, count, x);
    LoadChunk(args.momentum + begin, count, momentum);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      momentum[m] = __fadd_rn(__fmul_rn(args.beta, momentum[m]),
                              __fmul_rn(args.one_minus_beta, x[m]));
      if (!warming_up) x[m] = momentum[m];
    }
    StoreChunk(momentum, count, args.new_momentum + begin);
    CountNonfinite(momentum, args.nonfinite);
    StoreSigns(x, begin, count, args.stream, args.words);
  }
}

__global__ void __launch_bounds__(kThreads)
    MeanOfSignsKernel(MeanOfSigns args, ScaledSigns sent) {
  __shared__ float tiles[kWarpsPerBlock][kChunk];
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int count = CountOfChunk(args.size, begin);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    float mean[kSteps];
    MeanOfChunk(sent, blocks, begin, count, tiles[WarpInBlock()], mean);
    StoreChunk(mean, count, args.values.whole + begin);
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
  const ScaledSigns sent = {args.words, args.scale, args.num_workers,
                            tfgradcomp_format::WordsFor(args.size, 2), args.num_blocks};
  return Launch(gpu, CeilDiv(args.size, kChunk), MeanOfSignsKernel, args, sent);
}

}  // namespace tfgradcomp
