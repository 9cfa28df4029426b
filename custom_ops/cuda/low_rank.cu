// Products of matrices with factors of few columns.

#include "tensors.h"

namespace tfgradcomp {
namespace {

// Columns of a factor whose sums a thread has at a time.
constexpr int kRankTile = 4;

// -- M Q --------------------------------------------------------------------------

// Half a warp has the lanes of some rows, so that a tile are twice as many rows.
constexpr int kRowsOfHalf = 4;

// Adds the products of a chunk of columns from `first` on to the sums.
__device__ inline void AddChunk(const float* const (&rows)[kRowsOfHalf], int64_t first,
                                int64_t columns, const float* right, int64_t rank,
                                int count, float (&totals)[kRowsOfHalf][kRankTile]) {
  float sums[kRowsOfHalf][kRankTile] = {};
  const int64_t end = first + kLaneChunk < columns ? first + kLaneChunk : columns;
  for (int64_t j = first + Lane() % kLanesOfSum; j < end; j += kLanesOfSum) {
    float factor[kRankTile];
#pragma unroll
    for (int k = 0; k < kRankTile; ++k) factor[k] = k < count ? right[j * rank + k] : 0;
#pragma unroll
    for (int r = 0; r < kRowsOfHalf; ++r) {
      const float x = rows[r][j];
#pragma unroll
      for (int k = 0; k < kRankTile; ++k) {
        sums[r][k] = __fadd_rn(sums[r][k], __fmul_rn(x, factor[k]));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsOfHalf; ++r) {
#pragma unroll
    for (int k = 0; k < kRankTile; ++k) {
      totals[r][k] = __fadd_rn(totals[r][k], sums[r][k]);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    MultiplyMatricesKernel(MultiplyMatrices args, Tensors tensors) {
  const int64_t tiles = tensors.tiles[tensors.count], rank = args.rank;
  for (int64_t tile = FirstTile(); tile < tiles; tile += TileStride()) {
    const int index = tensors.Of(tile);
    const MatrixTensor& tensor = tensors.tensors[index];
    const int64_t half = 2 * (tile - tensors.tiles[index]) + Lane() / kLanesOfSum;
    const int64_t row = half * kRowsOfHalf;
    const float* rows[kRowsOfHalf];
    for (int r = 0; r < kRowsOfHalf; ++r) {
      // In place of a row behind the last one, the last one again.
      const int64_t exists = row + r < tensor.rows ? row + r : tensor.rows - 1;
      rows[r] = args.x.whole + tensor.element + exists * tensor.columns;
    }
    for (int64_t first = 0; first < rank; first += kRankTile) {
      const int count = rank - first < kRankTile ? rank - first : kRankTile;
      const float* const right = args.right + tensor.right + first;
      float totals[kRowsOfHalf][kRankTile] = {};
      for (int64_t j = 0; j < tensor.columns; j += kLaneChunk) {
        AddChunk(rows, j, tensor.columns, right, rank, count, totals);
      }
#pragma unroll
      for (int r = 0; r < kRowsOfHalf; ++r) {
#pragma unroll
        for (int k = 0; k < kRankTile; ++k) {
          const float sum = AddLanes(totals[r][k]);
          if (Lane() % kLanesOfSum == 0 && k < count && row + r < tensor.rows) {
            args.products[tensor.left + (row + r) * rank + first + k] = sum;
          }
        }
      }
    }
  }
}

// -- M^T P ------------------------------------------------------------------------

// Elements outside of matrices that a tile has.
constexpr int64_t kOthers = 4 * kThreads;

// A tile is a thread block's: kWarp columns of a matrix, a lane each. A warp adds up
// kLaneSteps rows at a time; then these sums are added in their order.
template <int kSums>
__device__ inline void MultiplyColumns(const MultiplyTransposed& args,
                                       const MatrixTensor& tensor, int64_t column,
                                       int64_t first) {
  static_assert(kSums <= kWarpsPerBlock, "");
  __shared__ float parts[kWarpsPerBlock][kSums][kWarp];
  const int64_t rank = args.rank;
  const int count = rank - first < kSums ? rank - first : kSums;
  const bool exists = column < tensor.columns;
  const float* const x = args.x.whole + tensor.element + column;
  const float* const left = args.left + tensor.left + first;
  float total = 0;  // Of the column of the factor that this warp adds up.
  for (int64_t round = 0; round < tensor.rows; round += kWarpsPerBlock * kLaneSteps) {
    const int64_t begin = round + WarpInBlock() * kLaneSteps;
    const int64_t end =
        begin + kLaneSteps < tensor.rows ? begin + kLaneSteps : tensor.rows;
    float sums[kSums] = {};
#pragma unroll 4
    for (int64_t row = begin; row < end; ++row) {
      const float value = exists ? x[row * tensor.columns] : 0;
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        const float factor = k < count ? left[row * rank + k] : 0;
        sums[k] = __fadd_rn(sums[k], __fmul_rn(value, factor));
      }
    }
#pragma unroll
    for (int k = 0; k < kSums; ++k) parts[WarpInBlock()][k][Lane()] = sums[k];
    __syncthreads();
    if (WarpInBlock() < kSums) {
      for (int part = 0; part < kWarpsPerBlock; ++part) {
        total = __fadd_rn(total, parts[part][WarpInBlock()][Lane()]);
      }
    }
    __syncthreads();
  }
  if (exists && WarpInBlock() < count) {
    args.factors[tensor.value + column * rank + first + WarpInBlock()] = total;
  }
}

__global__ void __launch_bounds__(kThreads)
    MultiplyTransposedKernel(MultiplyTransposed args, Tensors tensors) {
  const int64_t tiles = tensors.tiles[tensors.count];
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int index = tensors.Of(tile);
    const MatrixTensor& tensor = tensors.tensors[index];
    const int64_t place = tile - tensors.tiles[index];
    if (tensor.columns == 0) {
      for (int64_t i = place * kOthers + threadIdx.x;
           i < tensor.rows && i < (place + 1) * kOthers; i += kThreads) {
        args.factors[tensor.value + i] = args.x.whole[tensor.element + i];
      }
      continue;
    }
    const int64_t column = place * kWarp + Lane();
    for (int64_t first = 0; first < args.rank;) {
      if (args.rank - first > kRankTile) {
        MultiplyColumns<2 * kRankTile>(args, tensor, column, first);
        first += 2 * kRankTile;
      } else {
        MultiplyColumns<kRankTile>(args, tensor, column, first);
        first += kRankTile;
      }
    }
  }
}

// -- P Q^T ------------------------------------------------------------------------

// A tile has this many rows and kWarp columns.
constexpr int kRowsOfTile = 8;

__global__ void __launch_bounds__(kThreads)
    MultiplyFactorsKernel(MultiplyFactors args, Tensors tensors) {
  const int64_t tiles = tensors.tiles[tensors.count], rank = args.rank;
  for (int64_t tile = FirstTile(); tile < tiles; tile += TileStride()) {
    const int index = tensors.Of(tile);
    const MatrixTensor& tensor = tensors.tensors[index];
    const int64_t place = tile - tensors.tiles[index];
    float* const values = args.values.whole + tensor.element;
    const float* const right = args.right + tensor.value;
    if (tensor.columns == 0) {
      for (int64_t i = place * kOthers + Lane();
           i < tensor.rows && i < (place + 1) * kOthers; i += kWarp) {
        values[i] = right[i];
      }
      continue;
    }
    const int64_t across = CeilDiv(tensor.columns, kWarp);
    const int64_t row = place / across * kRowsOfTile;
    const int64_t column = place % across * kWarp + Lane();
    if (column >= tensor.columns) continue;
    const float* const left = args.left + tensor.left + row * rank;
    const int64_t left_rows = tensor.rows - row;
    const int rows = left_rows < kRowsOfTile ? left_rows : kRowsOfTile;
    float sums[kRowsOfTile];
    for (int64_t k = 0; k < rank; ++k) {
      const float factor = right[column * rank + k];
#pragma unroll
      for (int r = 0; r < kRowsOfTile; ++r) {
        if (r >= rows) break;
        const float product = __fmul_rn(left[r * rank + k], factor);
        sums[r] = k == 0 ? product : __fadd_rn(sums[r], product);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsOfTile; ++r) {
      if (r < rows) values[(row + r) * tensor.columns + column] = sums[r];
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const MultiplyMatrices& args) {
  return LaunchTensors(
      args,
      [](const MatrixTensor& t) {
        return t.columns == 0 ? 0 : CeilDiv(t.rows, 2 * kRowsOfHalf);
      },
      [&](const Tensors& tensors, int64_t tiles) {
        return Launch(gpu, tiles, MultiplyMatricesKernel, args, tensors);
      });
}

const char* Run(const Gpu& gpu, const MultiplyTransposed& args) {
  return LaunchTensors(
      args,
      [](const MatrixTensor& t) {
        return t.columns == 0 ? CeilDiv(t.rows, kOthers) : CeilDiv(t.columns, kWarp);
      },
      [&](const Tensors& tensors, int64_t tiles) {
        return LaunchBlocks(gpu, tiles, kThreads, MultiplyTransposedKernel, args,
                            tensors);
      });
}

const char* Run(const Gpu& gpu, const MultiplyFactors& args) {
  return LaunchTensors(
      args,
      [](const MatrixTensor& t) {
        return t.columns == 0
                   ? CeilDiv(t.rows, kOthers)
                   : CeilDiv(t.rows, kRowsOfTile) * CeilDiv(t.columns, kWarp);
      },
      [&](const Tensors& tensors, int64_t tiles) {
        return Launch(gpu, tiles, MultiplyFactorsKernel, args, tensors);
      });
}

}  // namespace tfgradcomp
