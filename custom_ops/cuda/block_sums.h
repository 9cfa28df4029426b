// Sums over blocks, in the order of word_format.h.
//
// A warp sums the parts of a chunk that belong to each block. Then passes over the
// partial sums climb the tree of each block, kFan nodes at a time. There are no
// atomics, so a result depends on its operands alone.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_SUMS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_SUMS_H_

#include "signs.h"

namespace tfgradcomp {
namespace {

using tfgradcomp_format::kLanes;
using tfgradcomp_format::kRows;
using tfgradcomp_format::SlotsFor;

// -- Chunks ------------------------------------------------------------------------

// The sum must have the order of the format and should not need a shuffle for each
// element. So a lane of the warp takes one of the kLanes lanes of kRowsPerLane
// neighbouring rows. Device memory is accessed in steps of whole words instead;
// therefore a chunk is copied through shared memory. The gaps put the elements of the
// lanes into different banks.
constexpr int kRowsPerLane = kRows * kLanes / kWarp;
constexpr int kGroup = kRowsPerLane * kLanes, kGap = 8;
constexpr int kChunkPlaces = kChunk + (kChunk / kGroup) * kGap;

// Returns the element of the chunk that is row `row` of this lane.
__device__ inline int RowElement(int row) {
  return Lane() / kLanes * kGroup + row * kLanes + Lane() % kLanes;
}

// The rows of this lane, of a chunk of which it has x[m] from step m. The warp shares
// the tile.
__device__ inline void ToRows(const float x[kSteps], float* tile,
                              float rows[kRowsPerLane]) {
#pragma unroll
  for (int m = 0; m < kSteps; ++m) {
    const int e = m * kWarp + Lane();
    tile[e + e / kGroup * kGap] = x[m];
  }
  __syncwarp();
#pragma unroll
  for (int row = 0; row < kRowsPerLane; ++row) {
    rows[row] = tile[RowElement(row) + Lane() / kLanes * kGap];
  }
  __syncwarp();  // Shuffles synchronize as well, but do not order memory accesses.
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

// Combines value(row) over the rows of this lane of the warp.
template <typename Combine, typename Value>
__device__ auto CombineRows(Combine combine, const Value& value) {
  return CombinePairs<kRowsPerLane>(combine, value);
}

// Combines these over the chunk: first those of the lanes of the warp with the same
// lane of the format, then the lanes of the format.
template <typename Combine, typename T>
__device__ T CombineLanes(Combine combine, T total) {
  for (int distance : {8, 16, 4, 2, 1}) {
    total = combine(total, __shfl_xor_sync(kAllLanes, total, distance));
  }
  return total;
}

template <typename Combine, typename Value>
__device__ auto CombineChunk(Combine combine, const Value& value) {
  return CombineLanes(combine, CombineRows(combine, value));
}

// Calls part(block, inside) for each block of a chunk, the elements [begin, end);
// inside(row) says whether that row of this lane lies in the block.
template <typename Part>
__device__ void ForEachBlock(const int64_t* row_splits, const TileBlocks& blocks,
                             int64_t begin, int64_t end, const Part& part) {
  if (blocks.first == blocks.last && end - begin == kChunk) {
    part(blocks.first, [](int) { return true; });
    return;
  }
  for (int64_t block = blocks.first; block <= blocks.last; ++block) {
    const int64_t from = row_splits[block] - begin;
    const int64_t to = row_splits[block + 1] - begin;
    const int low = from > 0 ? static_cast<int>(from) : 0;
    const int high = to < kChunk ? static_cast<int>(to) : kChunk;
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
// Each group of kFan nodes is combined into one node, in the slot of the first, so that
// no thread writes a slot that another thread reads.
//
// The groups of block b are numbered from FirstOf(b) on. This grows from a block to the
// next by more than the block has groups, so no two groups of different blocks have the
// same number.
struct Group {
  static __device__ int64_t FirstOf(const Partials& partials, int stride_bits,
                                    int64_t block) {
    return (partials.SlotOf(block) >> (stride_bits + kFanBits)) + block;
  }

  // All lanes of a warp call it together; lane l gets group `number` + l.
  __device__ Group(const Partials& partials, int stride_bits, int64_t number) {
    block = LastBefore(partials.num_blocks, [&](int64_t other) {
      return FirstOf(partials, stride_bits, other) <= number;
    });
    number += Lane();
    int64_t last =
        block + Lane() < partials.num_blocks ? block + Lane() : partials.num_blocks - 1;
    while (block < last) {
      const int64_t middle = last - (last - block) / 2;
      if (FirstOf(partials, stride_bits, middle) <= number) {
        block = middle;
      } else {
        last = middle - 1;
      }
    }
    const int64_t first_slot = partials.SlotOf(block);
    const int64_t begin = (number - FirstOf(partials, stride_bits, block))
                          << (stride_bits + kFanBits);
    const int64_t slots = (partials.row_splits[block + 1] - 1) / kChunk -
                          partials.row_splits[block] / kChunk + 1;
    first = first_slot + begin;
    const int64_t left =
        (slots - begin + (int64_t{1} << stride_bits) - 1) >> stride_bits;
    count = left <= 0 ? 0 : left < kFan ? static_cast<int>(left) : kFan;
  }

  int64_t block;
  int64_t first;  // The slot of its first node.
  int count;      // Of its nodes: 0 for a number that no group has.
};

// Combines the kNodesPerLane nodes from `begin` on of a group. A node without a partner
// is kept as it is: adding 0 changes only -0, which is never a result.
template <typename Combine>
__device__ double ClimbLane(const double* scratch, int64_t first, int count, int begin,
                            int stride_bits, Combine combine) {
  double nodes[kNodesPerLane];
#pragma unroll
  for (int i = 0; i < kNodesPerLane; ++i) {
    const int64_t place = static_cast<int64_t>(begin + i) << stride_bits;
    nodes[i] = begin + i < count ? scratch[first + place] : 0;
  }
  return CombinePairs<kNodesPerLane>(combine, [&nodes](int i) { return nodes[i]; });
}

// A tile is the groups of `lanes` numbers; a lane finds one group. If the group has few
// nodes, as most groups have if there are many blocks, the lane combines them alone.
// The warp combines the larger groups, one after the other. In the last pass,
// finish(quantity, block, result) gets the roots.
template <typename Finish>
__global__ void __launch_bounds__(kThreads)
    ClimbKernel(Partials partials, int stride_bits, int64_t groups, int lanes,
                bool is_last, Finish finish) {
  const int64_t tiles = CeilDiv(groups, lanes);
  for (int64_t tile = FirstTile(); tile < tiles * partials.quantities;
       tile += TileStride()) {
    const int quantity = static_cast<int>(tile / tiles);
    const int64_t number = tile % tiles * lanes;
    const Group own(partials, stride_bits, number);
    const bool has = Lane() < lanes && number + Lane() < groups;
    const int own_count = has ? own.count : 0;
    double* scratch = partials.scratch + quantity * partials.slots;
    const auto store = [&](int64_t block, int64_t first, double total) {
      if (is_last) {
        finish(quantity, block, total);
      } else {
        scratch[first] = total;
      }
    };
    const auto climb = [&](auto combine) {
      if (0 < own_count && own_count <= kNodesPerLane) {
        store(own.block, own.first,
              ClimbLane(scratch, own.first, own_count, 0, stride_bits, combine));
      }
      unsigned large = __ballot_sync(kAllLanes, own_count > kNodesPerLane);
      for (; large != 0; large &= large - 1) {
        const int lane = __popc((large & (0 - large)) - 1);
        const int64_t block = __shfl_sync(kAllLanes, own.block, lane);
        const int64_t first = __shfl_sync(kAllLanes, own.first, lane);
        const int count = __shfl_sync(kAllLanes, own.count, lane);
        double total = ClimbLane(scratch, first, count, Lane() * kNodesPerLane,
                                 stride_bits, combine);
        for (int distance = 1; distance < kWarp; distance *= 2) {
          total = combine(total, __shfl_xor_sync(kAllLanes, total, distance));
        }
        if (Lane() == 0) store(block, first, total);
      }
    };
    if (quantity == partials.maximum) {
      climb(Larger());
    } else {
      climb(Plus());
    }
  }
}

#ifndef TFGRADCOMP_ENOUGH_WARPS
#define TFGRADCOMP_ENOUGH_WARPS 4096
#endif
constexpr int64_t kEnoughWarps = TFGRADCOMP_ENOUGH_WARPS;

template <typename Finish>
const char* Climb(const Gpu& gpu, const Partials& partials, int64_t size,
                  Finish finish) {
  const int64_t chunks = CeilDiv(size, kChunk);
  for (int stride_bits = 0;; stride_bits += kFanBits) {
    const int64_t groups =
        (partials.slots >> (stride_bits + kFanBits)) + partials.num_blocks + 1;
    const bool is_last = chunks <= int64_t{1} << (stride_bits + kFanBits);
    // A warp has several groups only if there is work for many warps.
    const int64_t most = groups * partials.quantities / kEnoughWarps + 1;
    const int lanes = most < kWarp ? static_cast<int>(most) : kWarp;
    const char* error =
        Launch(gpu, CeilDiv(groups, lanes) * partials.quantities, ClimbKernel<Finish>,
               partials, stride_bits, groups, lanes, is_last, finish);
    if (error != nullptr || is_last) return error;
  }
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_BLOCK_SUMS_H_
