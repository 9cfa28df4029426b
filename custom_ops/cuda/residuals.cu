// Sums with residuals, and residuals rounded at random.

#include "warp.h"

namespace tfgradcomp {
namespace {

// A block of Philox has the random words of so many elements. A lane draws those of as
// many neighbours; memory is accessed in steps of whole warps instead. So the words go
// through shared memory, with gaps that put those of a step into different banks.
constexpr int kShared = 4, kTile = kShared * kWarp, kRow = kWarp + kWarp / kShared;

__global__ void __launch_bounds__(kThreads) AddScaledKernel(AddScaled args) {
  const float factor = *args.factor;
  for (int64_t t = FirstTile(); t * kWarp < args.size; t += TileStride()) {
    const int64_t j = t * kWarp + Lane();
    if (j >= args.size) continue;
    args.total[j] = __fadd_rn(args.x.whole[j], __fmul_rn(factor, args.y[j]));
  }
}

__global__ void __launch_bounds__(kThreads)
    RoundToBfloat16Kernel(RoundToBfloat16 args) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kShared * kRow];
  uint32_t* tile = tiles[WarpInBlock()];
  const RandomStream stream = ReadStream(args.stream);
  for (int64_t t = FirstTile(); t * kTile < args.size; t += TileStride()) {
    const int64_t begin = t * kTile + Lane(), left = args.size - begin;
    uint32_t bits[kShared];
#pragma unroll
    for (int i = 0; i < kShared; ++i) {
      bits[i] = i * kWarp < left ? BitsOf(args.x[begin + i * kWarp]) : 0;
    }
    uint32_t random[kShared];
    tfgradcomp_format::Philox(stream, stream.WordBlock(t * kTile + kShared * Lane()),
                              random);
#pragma unroll
    for (int i = 0; i < kShared; ++i) tile[i * kRow + Lane()] = random[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kShared; ++i) {
      const int e = i * kWarp + Lane();
      const uint32_t added = tile[e % kShared * kRow + e / kShared] >> 16;
      if (i * kWarp >= left) break;
      args.rounded[begin + i * kWarp] = static_cast<uint16_t>((bits[i] + added) >> 16);
    }
    __syncwarp();
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const AddScaled& args) {
  return Launch(gpu, CeilDiv(args.size, kWarp), AddScaledKernel, args);
}

const char* Run(const Gpu& gpu, const RoundToBfloat16& args) {
  return Launch(gpu, CeilDiv(args.size, kTile), RoundToBfloat16Kernel, args);
}

}  // namespace tfgradcomp
