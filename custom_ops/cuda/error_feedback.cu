// Error feedback with scaled signs, on a worker and on the server.

#include "block_sums.h"

namespace tfgradcomp {
namespace {

// Stores the signs of a chunk of p, and its sums of |p| in scratch. `tile` is shared by
// the warp.
template <typename Arguments>
__device__ void StoreSignsAndSums(const Arguments& args, const TileBlocks& blocks,
                                  int64_t begin, int count, const float p[kSteps],
                                  float* tile) {
  StoreWord(~TransposeBits(MinusBits(p)), begin, count, args.words);
  float rows[kRowsPerLane];
  ToRows(p, tile, rows);
  ForEachBlock(args.row_splits, blocks, begin, begin + count,
               [&](int64_t block, auto inside) {
                 const double sum = CombineChunk(Plus(), [&](int row) -> double {
                   return inside(row) ? fabsf(rows[row]) : 0;
                 });
                 if (Lane() == 0) args.scratch[begin / kChunk + block] = sum;
               });
}

// p of a worker goes to new_residual.
__global__ void __launch_bounds__(kThreads, 3)
    WorkerSumsKernel(SignErrorFeedback args) {
  __shared__ float tiles[kWarpsPerBlock][kChunkPlaces];
  const float ratio = *args.ratio;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float p[kSteps], residual[kSteps];
    LoadChunk(args.x.whole + begin, count, p);
    LoadChunk(args.residual + begin, count, residual);
    if (args.momentum != nullptr) {
      float momentum[kSteps];
      LoadChunk(args.momentum + begin, count, momentum);
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        momentum[m] = __fadd_rn(__fmul_rn(args.mu, momentum[m]), p[m]);
        p[m] = __fadd_rn(__fmul_rn(args.mu, momentum[m]), p[m]);
      }
      StoreChunk(momentum, count, args.new_momentum + begin);
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      p[m] = __fadd_rn(p[m], __fmul_rn(ratio, residual[m]));
    }
    StoreChunk(p, count, args.new_residual + begin);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    StoreSignsAndSums(args, blocks, begin, count, p, tiles[WarpInBlock()]);
  }
}

template <typename Arguments>
ScaledSigns SentTo(const Arguments& args) {
  return {args.sent_words, args.sent_scale, args.num_workers,
          tfgradcomp_format::WordsFor(args.size, 2), args.num_blocks};
}

// Makes a chunk of p of the server from one of the residual, which p has before.
template <typename Arguments>
__device__ void AddMean(const Arguments& args, const ScaledSigns& sent,
                        const TileBlocks& blocks, int64_t begin, int count,
                        float tile[kChunk], float p[kSteps]) {
  const float ratio = *args.ratio;
  float mean[kSteps];
  MeanOfChunk(sent, blocks, begin, count, tile, mean);
#pragma unroll
  for (int m = 0; m < kSteps; ++m) {
    p[m] = __fadd_rn(mean[m], __fmul_rn(ratio, p[m]));
  }
}

template <typename Arguments>
__global__ void __launch_bounds__(kThreads, 4)
    ServerSumsKernel(Arguments args, ScaledSigns sent) {
  __shared__ float tiles[kWarpsPerBlock][kChunkPlaces];
  float* tile = tiles[WarpInBlock()];
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float p[kSteps];
    LoadChunk(args.residual + begin, count, p);
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
    AddMean(args, sent, blocks, begin, count, tile, p);
    StoreSignsAndSums(args, blocks, begin, count, p, tile);
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

// Subtracts the scaled signs from a chunk of p; bit m of `minus` is 1 for minus. `tile`
// is shared by the warp.
__device__ inline void TakeSigns(const float* scales, const TileBlocks& blocks,
                                 int64_t begin, int count, uint32_t minus,
                                 float tile[kChunk], float p[kSteps]) {
  const bool in_one = blocks.first == blocks.last;
  float scale = scales[blocks.first];
  for (int e = Lane(); !in_one && e < count; e += kWarp) {
    tile[e] = scales[blocks.Of(begin + e)];
  }
#pragma unroll
  for (int m = 0; m < kSteps; ++m) {
    if (!in_one) scale = tile[m * kWarp + Lane()];
    p[m] = __fsub_rn(p[m], Signed((minus >> m & 1) == 0, scale));
  }
}

// The chunk of a warp in its second pass over the vector. The last chunks come first:
// they are still in the cache.
__device__ inline int64_t FromLast(int64_t chunk, int64_t size) {
  return CeilDiv(size, kChunk) - 1 - chunk;
}

// Subtracts the scaled signs from p, which new_residual holds.
__global__ void __launch_bounds__(kThreads)
    WorkerResidualKernel(SignErrorFeedback args) {
  __shared__ float tiles[kWarpsPerBlock][kChunk];
  const bool moving = *args.moving;
  const float* from = moving ? args.new_residual : args.residual;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = FromLast(chunk, args.size) * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float p[kSteps];
    LoadChunk(from + begin, count, p);
    if (moving) {
      const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
      TakeSigns(args.scale, blocks, begin, count, MinusBits(p), tiles[WarpInBlock()],
                p);
    }
    StoreChunk(p, count, args.new_residual + begin);
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    ServerResidualKernel(MeanSignResidual args, ScaledSigns sent) {
  __shared__ float tiles[kWarpsPerBlock][kChunk];
  float* tile = tiles[WarpInBlock()];
  const bool moving = *args.moving;
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = FromLast(chunk, args.size) * kChunk;
    const int count = CountOfChunk(args.size, begin);
    float p[kSteps];
    LoadChunk(args.residual + begin, count, p);
    if (moving) {
      const uint32_t word = LoadWord(args.words, begin, count);
      const TileBlocks blocks(args.row_splits, args.num_blocks, begin, begin + count);
      AddMean(args, sent, blocks, begin, count, tile, p);
      const uint32_t minus = ~TransposeBits(word);
      TakeSigns(args.scale, blocks, begin, count, minus, tile, p);
    }
    StoreChunk(p, count, args.new_residual + begin);
  }
}

// Adds up the sums of the chunks; finish(0, block, sum) gets those of the blocks.
template <typename Arguments, typename Finish>
const char* ClimbSums(const Gpu& gpu, const Arguments& args, Finish finish) {
  const Partials partials = {
      args.scratch,   SlotsFor(args.size, args.num_blocks), 1, -1, args.row_splits,
      args.num_blocks};
  return Climb(gpu, partials, args.size, finish);
}

template <typename Arguments, typename Finish>
const char* RunServerSums(const Gpu& gpu, const Arguments& args, Finish finish) {
  const char* error = Launch(gpu, CeilDiv(args.size, kChunk),
                             ServerSumsKernel<Arguments>, args, SentTo(args));
  return error != nullptr ? error : ClimbSums(gpu, args, finish);
}

}  // namespace

const char* Run(const Gpu& gpu, const SignErrorFeedback& args) {
  const int64_t chunks = CeilDiv(args.size, kChunk);
  if (chunks == 0) return nullptr;
  const char* error = Launch(gpu, chunks, WorkerSumsKernel, args);
  if (error != nullptr) return error;
  error = ClimbSums(gpu, args, StoreScale{args.scale, args.row_splits});
  return error != nullptr ? error : Launch(gpu, chunks, WorkerResidualKernel, args);
}

// To compute p twice takes less memory traffic than to keep it.
const char* Run(const Gpu& gpu, const MeanSignErrorFeedback& args) {
  if (args.size == 0) return nullptr;
  const char* error = RunServerSums(gpu, args, StoreScale{args.scale, args.row_splits});
  if (error != nullptr) return error;
  return Run(gpu, MeanSignResidual{args.sent_words, args.sent_scale, args.num_workers,
                                   args.residual, args.size, args.ratio, args.moving,
                                   args.words, args.scale, args.row_splits,
                                   args.num_blocks, args.new_residual});
}

const char* Run(const Gpu& gpu, const MeanSignSums& args) {
  if (args.size == 0) return nullptr;
  return RunServerSums(gpu, args, StoreSum{args.l1});
}

const char* Run(const Gpu& gpu, const MeanSignResidual& args) {
  return Launch(gpu, CeilDiv(args.size, kChunk), ServerResidualKernel, args,
                SentTo(args));
}

}  // namespace tfgradcomp
