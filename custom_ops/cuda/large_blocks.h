// Large blocks, each scanned by many thread blocks to find its levels.
//
// In each launch, the thread blocks scan the pieces of all large blocks and add their
// counts and sums to the blocks' states. The thread block that scans the last piece of
// a block evaluates the state, so no thread block waits. All sums are of integers, so
// their order does not matter. The number of scans depends on the rule alone, so the
// host launches all of them at once.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_LARGE_BLOCKS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_LARGE_BLOCKS_H_

#include "block.h"
#include "keys.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::kLargeBlock;
using tfgradcomp_format::kLargeBlockWords;
using tfgradcomp_format::kPiece;
using tfgradcomp_format::MostLargeBlocks;
using tfgradcomp_format::MostPieces;

// Elements that are searched for at once, digit by digit from the highest, by the
// number of elements with each digit.
constexpr int kTargets = 8, kDigitBits = 8, kBins = 1 << kDigitBits;
constexpr int kFirstShift = 32 - kDigitBits;
constexpr int kLookThreads = kBins;
constexpr int64_t kMostLevels = 2 * kTargets + 1, kMostLookBlocks = 2048;

// The state of a block, all zero at first. Members to which other thread blocks of the
// same launch add must be read by `Read`, past the cache of a multiprocessor: an
// earlier read of a neighbour has brought the old value there.
struct LargeBlock {
  using Sum = unsigned long long;  // NOLINT: CUDA's own type.

  Sum bins[kTargets][kBins];  // Elements with each digit, or (in [0]) their sums.
  Sum sums[kTargets];         // Of elements between two levels.
  int64_t ranks[kTargets];    // Of what is left to find, counted from 1; 0: found.
  int64_t above;              // The sum of elements above the prefix.
  Sum sum_above, number_up_to, number_equal;  // Beside the edge.
  Sum nonfinite;
  int64_t block;
  uint32_t prefixes[kTargets];  // Of the keys that are searched for.
  // The keys of the smallest and the largest element, or of the neighbours of the edge,
  // the one above it and the one up to it. The smaller keys are kept with their bits
  // inverted, so that 0 means none.
  uint32_t smallest_turned, largest, next_turned, last;
  uint32_t edge, pieces, done;
  uint32_t is_finished, has_prefix;

  __device__ uint32_t Smallest() const { return ~Read(smallest_turned); }
  __device__ uint32_t Largest() const { return Read(largest); }
  __device__ FixedPoint Fixed() const { return FixedPoint(Smallest(), Largest()); }

  template <typename T>
  static __device__ T Read(const T& number) {
    return *static_cast<const volatile T*>(&number);
  }

  // Returns a sum and resets it to 0 for the next scan.
  static __device__ int64_t Take(Sum& sum) {
    const int64_t taken = static_cast<int64_t>(Read(sum));
    sum = 0;
    return taken;
  }

  static __device__ void Add(Sum& sum, int64_t number) {
    if (number != 0) atomicAdd(&sum, static_cast<Sum>(number));
  }
};
static_assert(sizeof(LargeBlock) <= kLargeBlockWords * sizeof(uint64_t), "");
static_assert(kLargeBlockWords * sizeof(uint64_t) % alignof(LargeBlock) == 0, "");

// The parts of the scratch memory.
struct LargeBlocks {
  explicit LargeBlocks(const FindLevels& args)
      : words(args.scratch),
        num_pieces(words + MostLargeBlocks(args.size) * kLargeBlockWords),
        pieces(num_pieces + 1) {}

  __device__ LargeBlock& At(int64_t slot) const {
    return *reinterpret_cast<LargeBlock*>(words + slot * kLargeBlockWords);
  }

  uint64_t* words;
  uint64_t* num_pieces;
  uint64_t* pieces;  // Slot << 32 | the piece's number in its block.
};

__global__ void __launch_bounds__(kThreads)
    ListPiecesKernel(FindLevels args, LargeBlocks large) {
  for (int64_t tile = FirstTile(); tile * kWarp < args.num_blocks;
       tile += TileStride()) {
    const int64_t block = tile * kWarp + Lane();
    if (block >= args.num_blocks) continue;
    const int64_t begin = args.row_splits[block];
    const int64_t size = args.row_splits[block + 1] - begin;
    if (size <= kLargeBlock) continue;
    const uint64_t slot = begin / kLargeBlock, pieces = CeilDiv(size, kPiece);
    LargeBlock& state = large.At(slot);
    state.block = block;
    state.pieces = static_cast<uint32_t>(pieces);
    const uint64_t first =
        atomicAdd(reinterpret_cast<LargeBlock::Sum*>(large.num_pieces),
                  static_cast<LargeBlock::Sum>(pieces));
    for (uint64_t i = 0; i < pieces; ++i) large.pieces[first + i] = slot << 32 | i;
  }
}

// -- Looks --------------------------------------------------------------------------

// Calls each(key) for the elements of a piece, a part of them in each thread.
template <typename Each>
__device__ void ForEachKey(const FindLevels& args, const LargeBlock& state,
                           int64_t piece, const Each& each) {
  constexpr int kAtOnce = 8;  // Loads, so that the memory has enough to do.
  const int64_t begin = args.row_splits[state.block] + piece * kPiece;
  const int64_t left = args.row_splits[state.block + 1] - begin;
  const int count = static_cast<int>(left < kPiece ? left : kPiece);
  const bool magnitudes = args.rule == LevelRule::kSymmetric;
  const float* x = args.x.whole + begin;
  const auto key_of = [&](float number) {
    return KeyOf(magnitudes ? fabsf(number) : number);
  };
  int i = threadIdx.x;
  for (; i + (kAtOnce - 1) * kLookThreads < count; i += kAtOnce * kLookThreads) {
    float loaded[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) loaded[k] = x[i + k * kLookThreads];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) each(key_of(loaded[k]));
  }
  for (; i < count; i += kLookThreads) each(key_of(x[i]));
}

// Look(args, state, piece) adds to the state; Look.Decide(args, state) reads it when
// all pieces are done. All threads call both.
template <typename Look>
__global__ void __launch_bounds__(kLookThreads)
    LookKernel(FindLevels args, LargeBlocks large, Look look) {
  __shared__ bool is_last;
  const int64_t num_pieces = static_cast<int64_t>(*large.num_pieces);
  for (int64_t i = blockIdx.x; i < num_pieces; i += gridDim.x) {
    LargeBlock& state = large.At(static_cast<int64_t>(large.pieces[i] >> 32));
    if (state.is_finished) continue;
    look(args, state, static_cast<int64_t>(large.pieces[i] & 0xFFFFFFFF));
    __threadfence();  // The sums are visible before the piece is counted.
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(&state.done, 1u) + 1 == state.pieces;
    }
    __syncthreads();
    if (is_last) {
      __threadfence();
      look.Decide(args, state);
      if (threadIdx.x == 0) state.done = 0;
    }
    __syncthreads();
  }
}

template <typename Look>
const char* RunLook(const Gpu& gpu, const FindLevels& args, const Look& look) {
  const int64_t pieces = MostPieces(args.size);
  return LaunchBlocks(gpu, pieces < kMostLookBlocks ? pieces : kMostLookBlocks,
                      kLookThreads, LookKernel<Look>, args, LargeBlocks(args), look);
}

__device__ inline float& LevelOf(const FindLevels& args, const LargeBlock& state,
                                 int64_t k) {
  return args.levels[state.block * args.count + k];
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_LARGE_BLOCKS_H_
