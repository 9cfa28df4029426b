// Statistics of blocks.

#include "block_sums.h"

namespace tfgradcomp {
namespace {

enum Quantity { kMaximum, kL1, kSumOfSquares, kSum, kNonfinite, kQuantities };

__global__ void __launch_bounds__(kThreads)
    BlockStatisticsKernel(BlockStatistics args, int64_t slots) {
  __shared__ float tiles[kWarpsPerBlock][kChunkPlaces];
  float* tile = tiles[WarpInBlock()];
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float steps[kSteps], x[kRowsPerLane];
    LoadChunk(args.x.whole + begin, count, steps);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    ToRows(steps, tile, x);
    const auto part = [&](int64_t block, auto inside) {
      const auto value = [&](int row) -> double { return inside(row) ? x[row] : 0; };
      const auto magnitude_bits = [&](int row) {
        return inside(row) ? BitsOf(x[row]) & 0x7FFFFFFF : 0;
      };
      const uint32_t maximum = CombineChunk(Larger(), magnitude_bits);
      const double l1 = CombineChunk(Plus(), [&](int row) { return fabs(value(row)); });
      const double sum_of_squares =
          CombineChunk(Plus(), [&](int row) { return value(row) * value(row); });
      const double sum = CombineChunk(Plus(), value);
      const int nonfinite = CombineChunk(
          Plus(), [&](int row) { return magnitude_bits(row) >= 0x7F800000 ? 1 : 0; });
      if (Lane() != 0) return;
      double* slot = args.scratch + chunk + block;
      slot[kMaximum * slots] = maximum;  // The maximum of the bits.
      slot[kL1 * slots] = l1;
      slot[kSumOfSquares * slots] = sum_of_squares;
      slot[kSum * slots] = sum;
      slot[kNonfinite * slots] = nonfinite;
    };
    ForEachBlock(args.row_splits, blocks, begin, begin + count, part);
  }
}

struct StoreStatistic {
  double* statistics;
  int64_t num_blocks;

  __device__ void operator()(int quantity, int64_t block, double result) const {
    if (quantity == kMaximum) result = __uint_as_float(static_cast<uint32_t>(result));
    statistics[quantity * num_blocks + block] = result + 0.0;  // Changes -0 to 0.
  }
};

}  // namespace

const char* Run(const Gpu& gpu, const BlockStatistics& args) {
  const int64_t chunks = CeilDiv(args.size, kChunk);
  if (chunks == 0) return nullptr;
  const int64_t slots = SlotsFor(args.size, args.num_blocks);
  const char* error = Launch(gpu, chunks, BlockStatisticsKernel, args, slots);
  if (error != nullptr) return error;
  const Partials partials = {args.scratch, slots,           kQuantities,
                             kMaximum,     args.row_splits, args.num_blocks};
  return Climb(gpu, partials, args.size,
               StoreStatistic{args.statistics, args.num_blocks});
}

}  // namespace tfgradcomp
