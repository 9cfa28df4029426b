// Statistics of blocks.

#include "block_sums.h"

namespace tfgradcomp {
namespace {

enum Quantity { kMaximum, kL1, kSumOfSquares, kSum, kNonfinite, kQuantities };

struct Moments {
  double l1, squares, sum;

  __device__ Moments operator+(const Moments& other) const {
    return {l1 + other.l1, squares + other.squares, sum + other.sum};
  }
};

__global__ void __launch_bounds__(kThreads, 3)
    BlockStatisticsKernel(BlockStatistics args, int64_t slots) {
  __shared__ float tiles[kWarpsPerBlock][kChunkPlaces];
  float* tile = tiles[WarpInBlock()];
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float x[kSteps];
    LoadChunk(args.x.whole + begin, count, x);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    float rows[kRowsPerLane];
    ToRows(x, tile, rows);
    ForEachBlock(
        args.row_splits, blocks, begin, begin + count, [&](int64_t block, auto inside) {
          const auto value = [&](int row) { return inside(row) ? rows[row] : 0; };
          const auto magnitude_bits = [&](int row) {
            return BitsOf(value(row)) & 0x7FFFFFFF;
          };
          const uint32_t maximum = CombineChunk(Larger(), magnitude_bits);
          int nonfinite = 0;
          if (maximum >= 0x7F800000) {
            nonfinite = CombineChunk(Plus(), [&](int row) -> int {
              return magnitude_bits(row) >= 0x7F800000;
            });
          }
          const Moments moments = CombineRows(Plus(), [&](int row) -> Moments {
            const double wide = value(row);
            return {fabs(wide), wide * wide, wide};
          });
          const double l1 = CombineLanes(Plus(), moments.l1);
          const double squares = CombineLanes(Plus(), moments.squares);
          const double sum = CombineLanes(Plus(), moments.sum);
          if (Lane() != 0) return;
          double* slot = args.scratch + chunk + block;
          slot[kMaximum * slots] = maximum;  // The maximum of the bits.
          slot[kL1 * slots] = l1;
          slot[kSumOfSquares * slots] = squares;
          slot[kSum * slots] = sum;
          slot[kNonfinite * slots] = nonfinite;
        });
  }
}

struct StoreStatistic {
  double* statistics;
  int64_t num_blocks;
  int64_t sums;

  __device__ void operator()(int quantity, int64_t block, double result) const {
    if (quantity == kMaximum) result = __uint_as_float(static_cast<uint32_t>(result));
    const bool is_sum = quantity >= kL1 && quantity <= kSum;
    if (is_sum && !(sums >> (quantity - kL1) & 1)) result = 0;
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
               StoreStatistic{args.statistics, args.num_blocks, args.sums});
}

}  // namespace tfgradcomp
