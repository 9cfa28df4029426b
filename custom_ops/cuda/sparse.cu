// Sparse words.
//
// Warps mark the elements that are, or may be, sent, a bit for each. The numbers of
// elements sent are added up over the chunks, so that each warp knows where the words
// of its chunk begin: words are in the order of elements, whatever warp is first.
// Lane m of a warp has word m of the marks of a chunk.

#include "block.h"
#include "signs.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::FallOf;
using tfgradcomp_format::FloatOf;
using tfgradcomp_format::IsNormal;
using tfgradcomp_format::kIndexBits;
using tfgradcomp_format::kMostFall;
using tfgradcomp_format::SparseWord;
using tfgradcomp_format::WordsFor;

// The parts of the scratch memory.
struct Marks {
  Marks(uint32_t* scratch, int64_t size)
      : num_words(WordsFor(size, 2)),
        chunks(CeilDiv(size, kChunk)),
        words(scratch),
        minus(words + num_words),
        counts(minus + num_words),
        totals(counts + chunks),
        largest(totals + CeilDiv(chunks, kManyThreads)) {}

  __device__ uint32_t Load(const uint32_t* marks, int64_t chunk) const {
    const int64_t word = chunk * kSteps + Lane();
    return Lane() < kSteps && word < num_words ? marks[word] : 0;
  }

  __device__ void Store(uint32_t* marks, int64_t chunk, uint32_t own) const {
    const int64_t word = chunk * kSteps + Lane();
    if (Lane() < kSteps && word < num_words) marks[word] = own;
  }

  // The words before those of a chunk.
  __device__ int64_t PlaceOf(int64_t chunk) const {
    return int64_t{counts[chunk]} + totals[chunk / kManyThreads];
  }

  int64_t num_words, chunks;
  uint32_t* words;    // [num_words]
  uint32_t* minus;    // [num_words]: the signs, of PackOverThreshold.
  uint32_t* counts;   // [chunks]: the words sent, later those before the chunk,
  uint32_t* totals;   // and those before each kManyThreads chunks.
  uint32_t* largest;  // [num_blocks]: bits of the largest magnitude selected.
};

__device__ inline bool HasAny(uint32_t own) {
  return __ballot_sync(kAllLanes, own != 0) != 0;
}

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
    marks.Store(marks.words, chunk, own);
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      largest = Larger()(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    if (Lane() == 0) Raise(&marks.largest[blocks.first], largest);
  }
}

// The elements of a chunk that are marked, and the largest ones of their blocks.
class Marked {
 public:
  __device__ Marked(const PackUnambiguous& args, const Marks& marks, int64_t chunk)
      : residual_(args.new_residual),
        largest_(marks.largest),
        begin_(chunk * kChunk),
        blocks_(args.row_splits, args.num_blocks, begin_,
                begin_ + kChunk < args.size ? begin_ + kChunk : args.size),
        in_one_(blocks_.first == blocks_.last),
        largest_of_one_(FloatOf(largest_[blocks_.first])) {}

  // Calls body(step, j, word, marked, r, largest) on all lanes for the steps with
  // marks, several steps at once, as EachGathered does.
  template <typename Body>
  __device__ void Each(uint32_t own, const Body& body) const {
    constexpr int kStepsAtOnce = 4;
    for (int first = 0; first < kSteps; first += kStepsAtOnce) {
      uint32_t words[kStepsAtOnce], any = 0;
      float r[kStepsAtOnce];
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        words[i] = __shfl_sync(kAllLanes, own, first + i);
        any |= words[i];
      }
      if (any == 0) continue;
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        r[i] = Has(words[i]) ? residual_[ElementOf(first + i)] : 0;
      }
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        const int64_t j = ElementOf(first + i);
        body(first + i, j, words[i], Has(words[i]), r[i], LargestOf(j, words[i]));
      }
    }
  }

 private:
  static __device__ bool Has(uint32_t word) { return word >> Lane() & 1; }
  __device__ int64_t ElementOf(int step) const {
    return begin_ + step * kWarp + Lane();
  }
  __device__ float LargestOf(int64_t j, uint32_t word) const {
    if (in_one_) return largest_of_one_;
    return Has(word) ? FloatOf(largest_[blocks_.Of(j)]) : 0;
  }

  const float* residual_;
  const uint32_t* largest_;
  int64_t begin_;
  TileBlocks blocks_;
  bool in_one_;
  float largest_of_one_;
};

// The elements sent on the lanes before this one.
__device__ inline int SentBefore(uint32_t word) {
  return __popc(word & ((1u << Lane()) - 1));
}

// Keeps the elements sent of those selected.
__global__ void __launch_bounds__(kThreads)
    CountSentKernel(PackUnambiguous args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk < marks.chunks; chunk += TileStride()) {
    const uint32_t own = marks.Load(marks.words, chunk);
    uint32_t count = 0, sent = 0;
    if (HasAny(own)) {
      Marked(args, marks, chunk)
          .Each(own,
                [&](int step, int64_t, uint32_t, bool marked, float r, float largest) {
                  const bool close = marked && FallOf(r, largest) <= kMostFall;
                  const uint32_t word = __ballot_sync(kAllLanes, close);
                  if (Lane() == step) sent = word;
                  count += __popc(word);
                });
      marks.Store(marks.words, chunk, sent);
    }
    if (Lane() == 0) marks.counts[chunk] = count;
  }
}

__global__ void __launch_bounds__(kThreads)
    TakeThresholdKernel(PackOverThreshold args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk * kChunk < args.size; chunk += TileStride()) {
    const int64_t begin = chunk * kChunk;
    const int64_t end = begin + kChunk < args.size ? begin + kChunk : args.size;
    const TileBlocks blocks(args.row_splits, args.num_blocks, begin, end);
    const bool in_one = blocks.first == blocks.last;
    const float first = args.threshold[blocks.first];
    uint32_t count = 0, own = 0, own_minus = 0;
    EachGathered(args, chunk, [&](int step, int64_t j, bool inside, float r, float v) {
      const bool has_variance = args.variance != nullptr;
      const float t = in_one || !inside ? first : args.threshold[blocks.Of(j)];
      const bool sent =
          t < fabsf(r) && (!has_variance || IsUnambiguous(args.alpha, r, v));
      const bool is_minus = BitsOf(r) >> 31 != 0;
      const uint32_t marked = __ballot_sync(kAllLanes, sent);
      const uint32_t minus = __ballot_sync(kAllLanes, is_minus);
      if (Lane() == step) own = marked;
      if (Lane() == step) own_minus = minus;
      count += __popc(marked);
      if (!inside) return;
      args.new_residual[j] = sent ? __fsub_rn(r, is_minus ? -t : t) : r;
      if (!has_variance) return;
      const float less = __fsub_rn(v, __fmul_rn(__fadd_rn(t, t), fabsf(r)));
      const float lower = __fadd_rn(less, __fmul_rn(t, t));
      if (sent) v = lower > 0 ? lower : 0;
      args.new_variance[j] = __fmul_rn(v, args.decay);
    });
    marks.Store(marks.words, chunk, own);
    marks.Store(marks.minus, chunk, own_minus);
    if (Lane() == 0) marks.counts[chunk] = count;
  }
}

// Turns numbers into the sums of those before them among kManyThreads of them.
template <typename T>
__global__ void __launch_bounds__(kManyThreads)
    AddUpKernel(uint32_t* numbers, int64_t count, T* totals) {
  int64_t group = blockIdx.x;
  do {
    const int64_t i = group * kManyThreads + threadIdx.x;
    const int64_t number = i < count ? numbers[i] : 0;
    const int64_t before = SumBefore(number);
    if (i < count) numbers[i] = static_cast<uint32_t>(before);
    if (threadIdx.x == kManyThreads - 1)
      totals[group] = static_cast<T>(before + number);
    group += gridDim.x;
  } while (group * kManyThreads < count);
}

__global__ void __launch_bounds__(kThreads)
    WriteUnambiguousKernel(PackUnambiguous args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk < marks.chunks; chunk += TileStride()) {
    const uint32_t own = marks.Load(marks.words, chunk);
    if (!HasAny(own)) continue;
    int64_t place = marks.PlaceOf(chunk);
    Marked(args, marks, chunk)
        .Each(own,
              [&](int, int64_t j, uint32_t word, bool sent, float r, float largest) {
                if (sent) {
                  args.words[place + SentBefore(word)] =
                      SparseWord(BitsOf(r), FallOf(r, largest), j);
                  args.new_residual[j] = args.new_variance[j] = 0;
                }
                place += __popc(word);
              });
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteOverThresholdKernel(PackOverThreshold args, Marks marks) {
  for (int64_t chunk = FirstTile(); chunk < marks.chunks; chunk += TileStride()) {
    const uint32_t own = marks.Load(marks.words, chunk);
    if (!HasAny(own)) continue;
    const uint32_t own_minus = marks.Load(marks.minus, chunk);
    int64_t place = marks.PlaceOf(chunk);
#pragma unroll 4
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t word = __shfl_sync(kAllLanes, own, step);
      const uint32_t minus = __shfl_sync(kAllLanes, own_minus, step);
      if (word >> Lane() & 1) {
        args.words[place + SentBefore(word)] = SparseWord(
            minus >> Lane() << 31, 0, chunk * kChunk + step * kWarp + Lane());
      }
      place += __popc(word);
    }
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

// Puts the kernels that turn the counts of chunks into the places of their words.
const char* AddUp(const Gpu& gpu, const Marks& marks, int64_t* count) {
  const int64_t groups = CeilDiv(marks.chunks, kManyThreads);
  const char* error = LaunchBlocks(gpu, groups, kManyThreads, AddUpKernel<uint32_t>,
                                   marks.counts, marks.chunks, marks.totals);
  if (error != nullptr) return error;
  static_assert((int64_t{1} << kIndexBits) / kChunk <= kManyThreads * kManyThreads, "");
  return LaunchBlocks(gpu, 1, kManyThreads, AddUpKernel<int64_t>, marks.totals, groups,
                      count);
}

}  // namespace

const char* Run(const Gpu& gpu, const PackUnambiguous& args) {
  const Marks marks(args.scratch, args.size);
  const char* error = SetZero(gpu, args.nonfinite);
  if (error == nullptr) error = SetZero(gpu, marks.largest, args.num_blocks);
  if (error == nullptr) error = Launch(gpu, marks.chunks, SelectKernel, args, marks);
  if (error == nullptr) error = Launch(gpu, marks.chunks, CountSentKernel, args, marks);
  if (error == nullptr) error = AddUp(gpu, marks, args.count);
  if (error == nullptr) {
    error = Launch(gpu, marks.chunks, WriteUnambiguousKernel, args, marks);
  }
  if (error != nullptr) return error;
  return Launch(gpu, CeilDiv(args.num_blocks, kWarp), ExponentsKernel, args, marks);
}

const char* Run(const Gpu& gpu, const PackOverThreshold& args) {
  const Marks marks(args.scratch, args.size);
  const char* error = SetZero(gpu, args.nonfinite);
  if (error == nullptr)
    error = Launch(gpu, marks.chunks, TakeThresholdKernel, args, marks);
  if (error == nullptr) error = AddUp(gpu, marks, args.count);
  if (error != nullptr) return error;
  return Launch(gpu, marks.chunks, WriteOverThresholdKernel, args, marks);
}

const char* ReadNumber(const Gpu& gpu, const int64_t* number, int64_t* copy) {
  const cudaStream_t stream = static_cast<cudaStream_t>(gpu.stream);
  cudaError_t error =
      cudaMemcpyAsync(copy, number, sizeof(*copy), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace tfgradcomp
