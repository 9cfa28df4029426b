// Sums with residuals, and residuals rounded at random.

#include "warp.h"

namespace tfgradcomp {
namespace {

// Elements per lane: those that share a block of Philox.
constexpr int kShared = 4;

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
  for (int64_t t = FirstTile(); t * kShared * kWarp < args.size; t += TileStride()) {
    const int64_t begin = kShared * (t * kWarp + Lane());
    if (begin >= args.size) continue;
    const RandomStream stream = ReadStream(args.stream);
    uint32_t random[kShared];
    tfgradcomp_format::Philox(stream, stream.WordBlock(begin), random);
    for (int i = 0; i < kShared && begin + i < args.size; ++i) {
      const uint32_t bits = tfgradcomp_format::BitsOf(args.x[begin + i]);
      args.rounded[begin + i] = static_cast<uint16_t>((bits + (random[i] >> 16)) >> 16);
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const AddScaled& args) {
  return Launch(gpu, CeilDiv(args.size, kWarp), AddScaledKernel, args);
}

const char* Run(const Gpu& gpu, const RoundToBfloat16& args) {
  return Launch(gpu, CeilDiv(args.size, kShared * kWarp), RoundToBfloat16Kernel, args);
}

}  // namespace tfgradcomp
