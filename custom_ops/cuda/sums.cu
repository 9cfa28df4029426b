// Sums over blocks, in the order of word_format.h, and what needs them.
//
// A warp sums the parts of a chunk that belong to each block. Then passes over the
// partial sums climb each block's tree kFan nodes at a time: no atomics, so a result
// depends on nothing but its operands.

#include "signs.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::kLanes;
using tfgradcomp_format::kRows;
using tfgradcomp_format::SlotsFor;

// -- Chunks -----------------------------------------------------------------------

// To sum in the order of the format without a shuffle an element, a lane of the warp
// takes one of the kLanes lanes of kRowsPerLane neighbouring rows. Accesses to device
// memory are in steps of whole words instead, so a chunk goes through shared memory;
// the gaps put the lanes' elements into different banks.
constexpr int kRowsPerLane = kRows * kLanes / kWarp;
constexpr int kGroup = kRowsPerLane * kLanes, kGap = 8;
constexpr int kChunkPlaces = kChunk + (kChunk / kGroup) * kGap;

__device__ inline int StepPlace(int step) {
  const int e = step * kWarp + Lane();
  return e + e / kGroup * kGap;
}

// Element of the chunk that is row `row` of this lane's.
__device__ inline int RowElement(int row) {
  return Lane() / kLanes * kGroup + row * kLanes + Lane() % kLanes;
}

__device__ inline void ReadRows(const float* tile, float rows[kRowsPerLane]) {
#pragma unroll
  for (int row = 0; row < kRowsPerLane; ++row) {
    rows[row] = tile[RowElement(row) + Lane() / kLanes * kGap];
  }
}

// Combines value(first), ..., value(first + kCount - 1) in adjacent pairs.
template <int kCount, typename Combine, typename Value>
__device__ auto CombinePairs(Combine combine, const Value& value, int first = 0) {
  if constexpr (kCount == 1) {
    return value(first);
  } else {
    return combine(CombinePairs<kCount / 2>(combine, value, first),
                   CombinePairs<kCount / 2>(combine, value, first + kCount / 2));
  }
}

// Combines value(row) over the chunk: the lane's rows, then those of other lanes with
// the same lane of the format, then these.
template <typename Combine, typename Value>
__device__ auto CombineChunk(Combine combine, const Value& value) {
  auto total = CombinePairs<kRowsPerLane>(combine, value);
  for (int distance : {8, 16, 4, 2, 1}) {
    total = combine(total, __shfl_xor_sync(kAllLanes, total, distance));
  }
  return total;
}

// Calls part(block, inside) for each block of a chunk; inside(row) says whether that
// row of this lane lies in the block.
template <typename Part>
__device__ void ForEachBlock(const int64_t* row_splits, const TileBlocks& blocks,
                             int64_t chunk_begin, const Part& part) {
  for (int64_t block = blocks.first; block <= blocks.last; ++block) {
    const int64_t begin = row_splits[block] - chunk_begin;
    const int64_t end = row_splits[block + 1] - chunk_begin;
    const int low = begin > 0 ? static_cast<int>(begin) : 0;
    const int high = end < kChunk ? static_cast<int>(end) : kChunk;
    part(block, [low, high](int row) {
      return RowElement(row) >= low && RowElement(row) < high;
    });
  }
}

// -- The tree over a block's chunks -----------------------------------------------

constexpr int kNodesPerLane = 8, kFanBits = 8, kFan = kNodesPerLane * kWarp;
static_assert(kFan == 1 << kFanBits, "");

// Slots of the partial sums, for one or more quantities.
struct Partials {
  double* scratch;  // [quantities, slots]
  int64_t slots;
  int quantities;
  int maximum;  // The one of which the maximum is taken, or -1.
  const int64_t* row_splits;
  int64_t num_blocks;

  __device__ int64_t SlotOf(int64_t block) const {
    return row_splits[block] / kChunk + block;
  }
};

// Where the nodes of a block are `1 << stride_bits` slots apart, counted from its first
// slot, each kFan of them become one, in the slot of the first. So no warp writes what
// another one reads. In the last pass, finish(quantity, block, result) gets the roots.
template <typename Finish>
__global__ void __launch_bounds__(kThreads)
    ClimbKernel(Partials partials, int stride_bits, int64_t groups, bool is_last,
                Finish finish) {
  const int reach_bits = stride_bits + kFanBits;
  for (int64_t tile = FirstTile(); tile < groups * partials.quantities;
       tile += TileStride()) {
    const int quantity = static_cast<int>(tile / groups);
    // Groups of block b are numbered from SlotOf(b) / reach + b on: apart from those of
    // other blocks, as that grows from block to block by more than it has groups.
    const int64_t number = tile % groups;
    int64_t block = 0, last_block = partials.num_blocks - 1;
    while (block < last_block) {
      const int64_t middle = last_block - (last_block - block) / 2;
      if ((partials.SlotOf(middle) >> reach_bits) + middle <= number) {
        block = middle;
      } else {
        last_block = middle - 1;
      }
    }
    const int64_t first_slot = partials.SlotOf(block);
    const int64_t group = number - ((first_slot >> reach_bits) + block);
    const int64_t count = (partials.row_splits[block + 1] - 1) / kChunk -
                          partials.row_splits[block] / kChunk + 1;
    const int64_t begin = group << reach_bits;
    if (begin >= count) continue;
    double* slots = partials.scratch + quantity * partials.slots + first_slot;
    const int64_t lane_begin =
        begin + (static_cast<int64_t>(Lane() * kNodesPerLane) << stride_bits);
    double nodes[kNodesPerLane];
#pragma unroll
    for (int i = 0; i < kNodesPerLane; ++i) {
      // A node without partner goes up as it is: adding 0 changes at most -0, and
      // that is no result.
      const int64_t node = lane_begin + (static_cast<int64_t>(i) << stride_bits);
      nodes[i] = node < count ? slots[node] : 0;
    }
    const auto climb = [&nodes](auto combine) {
      double total =
          CombinePairs<kNodesPerLane>(combine, [&nodes](int i) { return nodes[i]; });
      for (int distance = 1; distance < kWarp; distance *= 2) {
        total = combine(total, __shfl_xor_sync(kAllLanes, total, distance));
      }
      return total;
    };
    const double total = quantity == partials.maximum ? climb(Larger()) : climb(Plus());
    if (Lane() != 0) continue;
    if (is_last) {
      finish(quantity, block, total);
    } else {
      slots[begin] = total;
    }
  }
}

template <typename Finish>
const char* Climb(const Gpu& gpu, const Partials& partials, int64_t size,
                  Finish finish) {
  const int64_t chunks = CeilDiv(size, kChunk);
  for (int stride_bits = 0;; stride_bits += kFanBits) {
    const int64_t groups =
        (partials.slots >> (stride_bits + kFanBits)) + partials.num_blocks + 1;
    const bool is_last = chunks <= int64_t{1} << (stride_bits + kFanBits);
    const char* error = Launch(gpu, groups * partials.quantities, ClimbKernel<Finish>,
                               partials, stride_bits, groups, is_last, finish);
    if (error != nullptr || is_last) return error;
  }
}

// -- Statistics -------------------------------------------------------------------

enum Quantity { kMaximum, kL1, kSumOfSquares, kSum, kNonfinite, kQuantities };

__global__ void __launch_bounds__(kThreads)
    BlockStatisticsKernel(BlockStatistics args, int64_t slots) {
  __shared__ float tiles[kWarpsPerBlock][kChunkPlaces];
  float* tile = tiles[WarpInBlock()];
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      const int64_t j = begin + m * kWarp + Lane();
      tile[StepPlace(m)] = j < args.size ? args.x.whole[j] : 0;
    }
    __syncwarp();
    float x[kRowsPerLane];
    ReadRows(tile, x);
    __syncwarp();  // Shuffles meet as well, but order no memory.
    ForEachBlock(args.row_splits, blocks, begin, [&](int64_t block, auto inside) {
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
      slot[kMaximum * slots] = maximum;  // Of the bits.
      slot[kL1 * slots] = l1;
      slot[kSumOfSquares * slots] = sum_of_squares;
      slot[kSum * slots] = sum;
      slot[kNonfinite * slots] = nonfinite;
    });
  }
}

struct StoreStatistic {
  double* statistics;
  int64_t num_blocks;

  __device__ void operator()(int quantity, int64_t block, double result) const {
    if (quantity == kMaximum) result = __uint_as_float(static_cast<uint32_t>(result));
    statistics[quantity * num_blocks + block] = result + 0.0;  // No -0.
  }
};

// -- Error feedback ---------------------------------------------------------------

// The inputs of p for one element, and p from them. A step loads several elements
// before it stores any, so that the memory has enough to do.
struct WorkerStep {
  struct Loaded {
    float x, momentum, residual;
  };

  __device__ Loaded Load(int64_t j, const TileBlocks&) const {
    return {args.x.whole[j], args.momentum == nullptr ? 0 : args.momentum[j],
            args.residual[j]};
  }

  __device__ float Combine(int64_t j, const Loaded& loaded, float ratio) const {
    float p = loaded.x;
    if (args.momentum != nullptr) {
      const float momentum = __fadd_rn(__fmul_rn(args.mu, loaded.momentum), loaded.x);
      args.new_momentum[j] = momentum;
      p = __fadd_rn(__fmul_rn(args.mu, momentum), loaded.x);
    }
    return __fadd_rn(p, __fmul_rn(ratio, loaded.residual));
  }

  __device__ void Keep(int64_t j, float p) const { args.new_residual[j] = p; }

  SignErrorFeedback args;
};

template <typename Arguments>
struct ServerInput {
  struct Loaded {
    float x, residual;
  };

  __device__ Loaded Load(int64_t j, const TileBlocks& blocks) const {
    return {MeanSign(args.sent_words, words_per_worker, args.sent_scale,
                     args.num_blocks, args.num_workers, j, blocks.Of(j)),
            args.residual[j]};
  }

  __device__ float Combine(int64_t, const Loaded& loaded, float ratio) const {
    return __fadd_rn(loaded.x, __fmul_rn(ratio, loaded.residual));
  }

  Arguments args;
  int64_t words_per_worker;
};

struct ServerStep : ServerInput<MeanSignErrorFeedback> {
  __device__ void Keep(int64_t j, float p) const { args.new_residual[j] = p; }
};

struct ServerSums : ServerInput<MeanSignSums> {
  __device__ void Keep(int64_t, float) const {}
};

// Keeps p if the step does, its signs in words and the sums of |p| in scratch.
template <typename Step>
__global__ void __launch_bounds__(kThreads) AddResidualKernel(Step step) {
  constexpr int kStepsAtOnce = 4;
  __shared__ float tiles[kWarpsPerBlock][kChunkPlaces];
  float* tile = tiles[WarpInBlock()];
  const auto& args = step.args;
  const float ratio = *args.ratio;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
    SignWords words;
    for (int first = 0; first < kSteps; first += kStepsAtOnce) {
      typename Step::Loaded loaded[kStepsAtOnce];
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        const int64_t j = begin + (first + i) * kWarp + Lane();
        if (j < end) loaded[i] = step.Load(j, blocks);
      }
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        const int64_t j = begin + (first + i) * kWarp + Lane();
        float p = 0;
        if (j < end) {
          p = step.Combine(j, loaded[i], ratio);
          step.Keep(j, p);
        }
        words.Add(first + i, j < end, p);
        tile[StepPlace(first + i)] = p;
      }
    }
    words.Store(chunk, args.size, nullptr, args.words);
    __syncwarp();
    float p[kRowsPerLane];
    ReadRows(tile, p);
    __syncwarp();
    ForEachBlock(args.row_splits, blocks, begin, [&](int64_t block, auto inside) {
      const double sum = CombineChunk(
          Plus(), [&](int row) -> double { return inside(row) ? fabsf(p[row]) : 0; });
      if (Lane() == 0) args.scratch[chunk + block] = sum;
    });
  }
}

struct StoreScale {
  float* scale;
  const int64_t* row_splits;

  __device__ void operator()(int, int64_t block, double sum) const {
    const int64_t count = row_splits[block + 1] - row_splits[block];
    scale[block] = static_cast<float>(sum / static_cast<double>(count));
  }
};

struct StoreSum {
  double* sums;

  __device__ void operator()(int, int64_t block, double sum) const {
    sums[block] = sum;
  }
};

// Takes out of p, in new_residual, what its signs and the scale say.
template <typename Arguments>
__global__ void __launch_bounds__(kThreads) TakeScaleKernel(Arguments args) {
  const bool moving = *args.moving;
  const float* from = moving ? args.new_residual : args.residual;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
    float value[kSteps];
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      const int64_t j = begin + m * kWarp + Lane();
      value[m] = j < end ? from[j] : 0;
    }
    float scale = args.scale[blocks.first];
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      const int64_t j = begin + m * kWarp + Lane();
      if (j >= end) break;
      if (moving) {
        if (blocks.first != blocks.last) scale = args.scale[blocks.Of(j)];
        value[m] = __fsub_rn(value[m], SignCode(value[m]) ? scale : -scale);
      }
      args.new_residual[j] = value[m];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    MeanSignResidualKernel(ServerInput<MeanSignResidual> input) {
  const MeanSignResidual& args = input.args;
  const bool moving = *args.moving;
  const float ratio = *args.ratio;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
#pragma unroll 4
    for (int64_t j = begin + Lane(); j < end; j += kWarp) {
      if (!moving) {
        args.new_residual[j] = args.residual[j];
        continue;
      }
      const float p = input.Combine(j, input.Load(j, blocks), ratio);
      const float scale = args.scale[blocks.Of(j)];
      const bool plus = args.words[j / kWarp] >> (j % kWarp) & 1;
      args.new_residual[j] = __fsub_rn(p, plus ? scale : -scale);
    }
  }
}

// Makes p and its signs; finish(0, block, sum) gets the sums of |p|.
template <typename Step, typename Finish>
const char* RunSums(const Gpu& gpu, const Step& step, Finish finish) {
  const auto& args = step.args;
  const Partials partials = {
      args.scratch,   SlotsFor(args.size, args.num_blocks), 1, -1, args.row_splits,
      args.num_blocks};
  const int64_t chunks = CeilDiv(args.size, kChunk);
  const char* error = Launch(gpu, chunks, AddResidualKernel<Step>, step);
  return error != nullptr ? error : Climb(gpu, partials, args.size, finish);
}

template <typename Step>
const char* RunErrorFeedback(const Gpu& gpu, const Step& step) {
  const auto& args = step.args;
  if (args.size == 0) return nullptr;
  const char* error = RunSums(gpu, step, StoreScale{args.scale, args.row_splits});
  if (error != nullptr) return error;
  using Arguments = decltype(Step::args);
  return Launch(gpu, CeilDiv(args.size, kChunk), TakeScaleKernel<Arguments>, args);
}

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

const char* Run(const Gpu& gpu, const SignErrorFeedback& args) {
  return RunErrorFeedback(gpu, WorkerStep{args});
}

const char* Run(const Gpu& gpu, const MeanSignErrorFeedback& args) {
  return RunErrorFeedback(
      gpu, ServerStep{{args, tfgradcomp_format::WordsFor(args.size, 2)}});
}

const char* Run(const Gpu& gpu, const MeanSignSums& args) {
  if (args.size == 0) return nullptr;
  return RunSums(gpu, ServerSums{{args, tfgradcomp_format::WordsFor(args.size, 2)}},
                 StoreSum{args.l1});
}

const char* Run(const Gpu& gpu, const MeanSignResidual& args) {
  const ServerInput<MeanSignResidual> input = {
      args, tfgradcomp_format::WordsFor(args.size, 2)};
  return Launch(gpu, CeilDiv(args.size, kChunk), MeanSignResidualKernel, input);
}

}  // namespace tfgradcomp
