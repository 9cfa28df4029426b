// Sparse words, and their mean.
//
// Warps mark the elements that are, or may be, sent, a bit for each. The numbers of
// elements sent are added up over the chunks, so that each warp knows where the words
// of its chunk begin: words are in the order of elements, whatever warp is first.

#include "block.h"
#include "signs.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::FactorOf;
using tfgradcomp_format::FallOf;
using tfgradcomp_format::FloatOf;
using tfgradcomp_format::IndexOf;
using tfgradcomp_format::IsNormal;
using tfgradcomp_format::kMostFall;
using tfgradcomp_format::SparseWord;
using tfgradcomp_format::WordsFor;

// -- Packing ----------------------------------------------------------------------

// The parts of the scratch memory.
struct Marks {
  Marks(uint32_t* scratch, int64_t size)
      : num_words(WordsFor(size, 2)),
        words(scratch),
        counts(words + num_words),
        largest(counts + CeilDiv(size, kChunk)) {}

  // Word `step` of a chunk.
  __device__ uint32_t At(int64_t chunk, int step) const {
    const int64_t word = chunk * kSteps + step;
    return word < num_words ? words[word] : 0;
  }

  // Stores all words of a chunk: lane m has word m.
  __device__ void Store(int64_t chunk, uint32_t marked) const {
    const int64_t word = chunk * kSteps + Lane();
    if (Lane() < kSteps && word < num_words) words[word] = marked;
  }

  // All lanes must call this.
  __device__ bool HasAny(int64_t chunk) const {
    const uint32_t marked = Lane() < kSteps ? At(chunk, Lane()) : 0;
    return __ballot_sync(kAllLanes, marked != 0) != 0;
  }

  int64_t num_words;
  uint32_t* words;    // [num_words]
  uint32_t* counts;   // [chunks]: the words sent, later the words before the chunk.
  uint32_t* largest;  // [num_blocks]: bits of the largest magnitude selected.
};

// r and v of a chunk's elements, several steps at once, so that the memory has enough
// to do: calls body(step, j, inside, r, v) on all lanes and adds to *nonfinite.
template <typename Args, typename Body>
__device__ void EachGathered(const Args& args, int64_t chunk, const Body& body) {
  constexpr int kStepsAtOnce = 4;
  int nonfinite = 0;
  for (int first = 0; first < kSteps; first += kStepsAtOnce) {
    float x[kStepsAtOnce], e[kStepsAtOnce], m[kStepsAtOnce], w[kStepsAtOnce];
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; ++i) {
      const int64_t j = chunk * kChunk + (first + i) * kWarp + Lane();
      const bool inside = j < args.size, has_variance = args.variance != nullptr;
      x[i] = inside ? args.x.whole[j] : 0;
      e[i] = inside ? args.residual[j] : 0;
      m[i] = inside && has_variance ? args.moments.whole[j] : 0;
      w[i] = inside && has_variance ? args.variance[j] : 0;
    }
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; ++i) {
      const int64_t j = chunk * kChunk + (first + i) * kWarp + Lane();
      const float r = __fadd_rn(e[i], x[i]), v = __fadd_rn(w[i], m[i]);
      nonfinite += CountLanes(IsNonfinite(r) || IsNonfinite(v));
      body(first + i, j, j < args.size, r, v);
    }
  }
  AddCount(args.nonfinite, nonfinite);
}

// Raises a number to at least `least`. The value read first may be outdated, and so too
// small; then the atomic operation corrects it. Most warps do not need it.
__device__ inline void Raise(uint32_t* number, uint32_t least) {
  if (*static_cast<volatile uint32_t*>(number) < least) atomicMax(number, least);
}

__device__ inline bool IsUnambiguous(float alpha, float r, float v) {
  return __fmul_rn(alpha, v) < __fmul_rn(r, r);
}

__global__ void __launch_bounds__(kThreads)
    SelectKernel(PackUnambiguous args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
    const bool in_one = blocks.first == blocks.last;
    uint32_t largest = 0, own = 0;
    EachGathered(args, chunk, [&](int step, int64_t j, bool inside, float r, float v) {
      const bool selected = inside && IsNormal(r) && IsUnambiguous(args.alpha, r, v);
      const uint32_t marked = __ballot_sync(kAllLanes, selected);
      if (Lane() == step) own = marked;
      if (!inside) return;
      args.new_residual[j] = r;
      args.new_variance[j] = __fmul_rn(v, args.decay);
      if (!selected) return;
      const uint32_t magnitude = BitsOf(r) & 0x7FFFFFFF;
      if (in_one) {
        largest = Larger()(largest, magnitude);
      } else {
        Raise(&marks.largest[blocks.Of(j)], magnitude);
      }
    });
    marks.Store(chunk, own);
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      largest = Larger()(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    if (Lane() == 0) Raise(&marks.largest[blocks.first], largest);
  }
}

// Keeps the elements sent of those selected.
__global__ void __launch_bounds__(kThreads)
    CountSentKernel(PackUnambiguous args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    uint32_t count = 0;
    if (marks.HasAny(chunk)) {
      const int64_t begin = chunk * kChunk;
      const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
      const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
      uint32_t own = 0;
      for (int step = 0; step < kSteps; ++step) {
        const int64_t j = begin + step * kWarp + Lane();
        bool sent = marks.At(chunk, step) >> Lane() & 1;
        if (sent) {
          const float largest = FloatOf(marks.largest[blocks.Of(j)]);
          sent = FallOf(args.new_residual[j], largest) <= kMostFall;
        }
        const uint32_t kept = __ballot_sync(kAllLanes, sent);
        if (Lane() == step) own = kept;
        count += __popc(kept);
      }
      __syncwarp();  // All lanes have read.
      marks.Store(chunk, own);
    }
    if (Lane() == 0) marks.counts[chunk] = count;
  }
}

__global__ void __launch_bounds__(kThreads)
    TakeThresholdKernel(PackOverThreshold args, Marks marks) {
  const float t = args.threshold, twice = __fadd_rn(t, t), square = __fmul_rn(t, t);
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    uint32_t count = 0, own = 0;
    EachGathered(args, chunk, [&](int step, int64_t j, bool inside, float r, float v) {
      const bool has_variance = args.variance != nullptr;
      const bool sent =
          t < fabsf(r) && (!has_variance || IsUnambiguous(args.alpha, r, v));
      const uint32_t marked = __ballot_sync(kAllLanes, sent);
      if (Lane() == step) own = marked;
      count += __popc(marked);
      if (!inside) return;
      args.new_residual[j] = sent ? __fsub_rn(r, BitsOf(r) >> 31 ? -t : t) : r;
      if (!has_variance) return;
      const float lower = __fadd_rn(__fsub_rn(v, __fmul_rn(twice, fabsf(r))), square);
      if (sent) v = lower > 0 ? lower : 0;
      args.new_variance[j] = __fmul_rn(v, args.decay);
    });
    marks.Store(chunk, own);
    if (Lane() == 0) marks.counts[chunk] = count;
  }
}

// Turns the counts of chunks into the counts before them. One thread block; each thread
// has several neighbouring chunks, so that the block synchronizes seldom.
__global__ void __launch_bounds__(kManyThreads)
    AddUpKernel(uint32_t* counts, int64_t chunks, int64_t* count) {
  constexpr int kChunksAtOnce = 16;
  int64_t total = 0;
  for (int64_t first = 0; first < chunks;
       first += int64_t{blockDim.x} * kChunksAtOnce) {
    const int64_t own = first + int64_t{threadIdx.x} * kChunksAtOnce;
    uint32_t kept[kChunksAtOnce];
    int64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      kept[i] = own + i < chunks ? counts[own + i] : 0;
      sum += kept[i];
    }
    int64_t before = total + SumBefore(sum);
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      if (own + i < chunks) counts[own + i] = static_cast<uint32_t>(before);
      before += kept[i];
    }
    total += CombineThreads(sum, Plus());
  }
  if (threadIdx.x == 0) *count = total;
}

// Calls put(j, place) on the lanes whose element is sent.
template <typename Put>
__device__ void EachSent(const Marks& marks, int64_t chunk, const Put& put) {
  int64_t place = marks.counts[chunk];
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t sent = marks.At(chunk, step), before = (1u << Lane()) - 1;
    if (sent >> Lane() & 1) {
      put(chunk * kChunk + step * kWarp + Lane(), place + __popc(sent & before));
    }
    place += __popc(sent);
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteUnambiguousKernel(PackUnambiguous args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    if (!marks.HasAny(chunk)) continue;
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
    EachSent(marks, chunk, [&](int64_t j, int64_t place) {
      const float r = args.new_residual[j];
      const float largest = FloatOf(marks.largest[blocks.Of(j)]);
      args.words[place] = SparseWord(BitsOf(r), FallOf(r, largest), j);
      args.new_residual[j] = args.new_variance[j] = 0;
    });
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteOverThresholdKernel(PackOverThreshold args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    if (!marks.HasAny(chunk)) continue;
    EachSent(marks, chunk, [&](int64_t j, int64_t place) {
      // The remainder has the sign of r.
      args.words[place] = SparseWord(BitsOf(args.new_residual[j]), 0, j);
    });
  }
}

__global__ void __launch_bounds__(kThreads)
    ExponentsKernel(PackUnambiguous args, Marks marks) {
  for (int64_t tile = FirstTile(); tile * kWarp < args.num_blocks;
       tile += TileStride()) {
    const int64_t block = tile * kWarp + Lane();
    if (block >= args.num_blocks) continue;
    const uint32_t bits = marks.largest[block];
    const int exponent = static_cast<int>(bits >> 23) - 127;
    args.exponents[block] = static_cast<int8_t>(bits == 0 ? -128 : exponent);
  }
}

// -- The mean ---------------------------------------------------------------------

constexpr int kSparseTile = 1024;

// The number of a row's words that come before element `begin`.
__device__ inline int64_t WordsBefore(const uint32_t* words, int64_t num_words,
                                      int64_t begin) {
  int64_t low = 0, high = num_words;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (IndexOf(words[middle]) < begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) MeanOfSparseKernel(MeanOfSparse args) {
  __shared__ float tiles[kWarpsPerBlock][kSparseTile];
  float* tile = tiles[WarpInBlock()];
  for (int64_t t = FirstTile(); t * kSparseTile < args.size; t += TileStride()) {
    const int64_t begin = t * kSparseTile;
    const int64_t left = args.size - begin;
    const int64_t end = left < kSparseTile ? args.size : begin + kSparseTile;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
    for (int e = Lane(); e < kSparseTile; e += kWarp) tile[e] = 0;
    int64_t first = 0;  // Of worker Lane() of 32.
    for (int64_t worker = 0; worker < args.num_workers; ++worker) {
      if (worker % kWarp == 0) {
        const int64_t own = worker + Lane();
        if (own < args.num_workers) {
          first = WordsBefore(args.words + own * args.num_words, args.num_words, begin);
        }
      }
      __syncwarp();  // Another lane may have added to the same element.
      const uint32_t* words = args.words + worker * args.num_words;
      const float* scale = args.scale + worker * args.num_blocks;
      int64_t at = __shfl_sync(kAllLanes, first, static_cast<int>(worker % kWarp));
      for (at += Lane(); at < args.num_words; at += kWarp) {
        const int64_t j = IndexOf(words[at]);
        if (j >= end) break;
        if (j < begin) continue;  // Out of order: the result is undefined.
        float& sum = tile[j - begin];
        sum = __fadd_rn(sum, __fmul_rn(scale[blocks.Of(j)], FactorOf(words[at])));
      }
    }
    WriteMeans(tile, begin, end, args.num_workers, args.values.whole);
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const PackUnambiguous& args) {
  const Marks marks(args.scratch, args.size);
  const int64_t chunks = CeilDiv(args.size, kChunk);
  const char* error = SetZero(gpu, args.nonfinite);
  if (error == nullptr) error = SetZero(gpu, marks.largest, args.num_blocks);
  if (error == nullptr) error = Launch(gpu, chunks, SelectKernel, args, marks);
  if (error == nullptr) error = Launch(gpu, chunks, CountSentKernel, args, marks);
  if (error == nullptr) {
    error = LaunchBlocks(gpu, 1, kManyThreads, AddUpKernel, marks.counts, chunks,
                         args.count);
  }
  if (error == nullptr) {
    error = Launch(gpu, chunks, WriteUnambiguousKernel, args, marks);
  }
  if (error != nullptr) return error;
  return Launch(gpu, CeilDiv(args.num_blocks, kWarp), ExponentsKernel, args, marks);
}

const char* Run(const Gpu& gpu, const PackOverThreshold& args) {
  const Marks marks(args.scratch, args.size);
  const int64_t chunks = CeilDiv(args.size, kChunk);
  const char* error = SetZero(gpu, args.nonfinite);
  if (error == nullptr) error = Launch(gpu, chunks, TakeThresholdKernel, args, marks);
  if (error == nullptr) {
    error = LaunchBlocks(gpu, 1, kManyThreads, AddUpKernel, marks.counts, chunks,
                         args.count);
  }
  if (error != nullptr) return error;
  return Launch(gpu, chunks, WriteOverThresholdKernel, args, marks);
}

const char* Run(const Gpu& gpu, const MeanOfSparse& args) {
  return Launch(gpu, CeilDiv(args.size, kSparseTile), MeanOfSparseKernel, args);
}

const char* ReadNumber(const Gpu& gpu, const int64_t* number, int64_t* copy) {
  const cudaStream_t stream = static_cast<cudaStream_t>(gpu.stream);
  cudaError_t error =
      cudaMemcpyAsync(copy, number, sizeof(*copy), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace tfgradcomp
