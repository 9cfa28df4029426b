// Error feedback with scaled signs, on a worker and on the server.

#include "block_sums.h"
#include "signs.h"

namespace tfgradcomp {
namespace {

// Loads the inputs of p for one element and computes p. A kernel loads several elements
// before it stores any, which keeps the memory busy.
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

// Writes the signs of p to words and the sums of |p| to scratch; the step may keep p.
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

// Subtracts the scaled signs from p, which new_residual holds.
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

// Computes p and its signs; finish(0, block, sum) gets the sums of |p|.
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
