// Sums over blocks, in the order of word_format.h.
//
// A warp sums the parts of a chunk that belong to each block. Then passes over the
// partial sums climb the tree of each block, kFan nodes at a time. There are no
// atomics, so a result depends on nothing but its operands.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_SUMS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_SUMS_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::kLanes;
using tfgradcomp_format::kRows;
using tfgradcomp_format::SlotsFor;

// -- Chunks ------------------------------------------------------------------------

// The sum must have the order of the format, and shall not need a shuffle for each
// element. So a lane of the warp takes one of the kLanes lanes of kRowsPerLane
// neighbouring rows. Device memory is accessed in steps of whole words instead;
// therefore a chunk is copied through shared memory. The gaps put the elements of the
// lanes into different banks.
constexpr int kRowsPerLane = kRows * kLanes / kWarp;
constexpr int kGroup = kRowsPerLane * kLanes, kGap = 8;
constexpr int kChunkPlaces = kChunk + (kChunk / kGroup) * kGap;

__device__ inline int StepPlace(int step) {
  const int e = step * kWarp + Lane();
  return e + e / kGroup * kGap;
}

// Returns the element of the chunk that is row `row` of this lane.
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

// Combines value(row) over the chunk: first the rows of this lane of the warp, then
// those of the lanes of the warp with the same lane of the format, then the lanes of
// the format.
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

// -- The tree over a block's chunks ------------------------------------------------

constexpr int kNodesPerLane = 8, kFanBits = 8, kFan = kNodesPerLane * kWarp;
static_assert(kFan == 1 << kFanBits, "");

// The slots of the partial sums, of one or more quantities.
struct Partials {
  double* scratch;  // [quantities, slots]
  int64_t slots;
  int quantities;
  int maximum;  // The quantity of which the maximum is taken, or -1.
  const int64_t* row_splits;
  int64_t num_blocks;

  __device__ int64_t SlotOf(int64_t block) const {
    return row_splits[block] / kChunk + block;
  }
};

// The nodes of a block are `1 << stride_bits` slots apart, counted from its first slot.
// Each kFan of them are combined to one node, in the slot of the first, so that no warp
// writes what another warp reads. In the last pass, finish(quantity, block, result)
// gets the roots.
template <typename Finish>
__global__ void __launch_bounds__(kThreads)
    ClimbKernel(Partials partials, int stride_bits, int64_t groups, bool is_last,
                Finish finish) {
  const int reach_bits = stride_bits + kFanBits;
  for (int64_t tile = FirstTile(); tile < groups * partials.quantities;
       tile += TileStride()) {
    const int quantity = static_cast<int>(tile / groups);
    // The groups of block b are numbered from SlotOf(b) / reach + b on. This number
    // grows from a block to the next by more than the block has groups, so no two
    // groups of different blocks have the same number.
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
      // A node without a partner is kept as it is: adding 0 changes only -0, which is
      // never a result.
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

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_SUMS_H_
