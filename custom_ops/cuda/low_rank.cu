// Products of matrices with factors of few columns.

#include "tensors.h"

namespace tfgradcomp {
namespace {

// A kernel takes a tile of columns of the factors at a time: their number, a constant.
template <int Columns>
struct RankTile {
  static constexpr int kColumns = Columns;
};

// Calls launch(tile) for the tile that suits `rank` columns.
template <typename LaunchKernel>
const char* LaunchByRank(int64_t rank, const LaunchKernel& launch) {
  const int64_t columns = CeilDiv(rank, CeilDiv(rank, 12));
  if (columns <= 4) return launch(RankTile<4>());
  if (columns <= 8) return launch(RankTile<8>());
  return launch(RankTile<12>());
}

// Some threads copy columns from `first` on of a factor's rows to shared memory. In
// place of columns that do not exist they write `other`.
template <int Columns, int Stride>
__device__ void CopyFactor(const float* factor, int64_t rank, int64_t first, int rows,
                           float other, int thread, int threads, float (*to)[Stride]) {
  const int k = thread % Columns, at_once = threads / Columns;
  const bool exists = first + k < rank;
  int row = thread / Columns;
  if (row >= at_once) return;
  const float* from = factor + row * rank + first + k;
#pragma unroll 4
  for (; row < rows; row += at_once, from += at_once * rank) {
    to[row][k] = exists ? *from : other;
  }
}

// Elements outside of matrices that a warp copies.
constexpr int64_t kOthers = 1024;

__device__ inline void CopyOthers(const float* from, int64_t place, int64_t count,
                                  float* to) {
  const int64_t begin = place * kOthers, left = count - begin;
  const int some = left < kOthers ? static_cast<int>(left) : kOthers;
#pragma unroll 8
  for (int i = Lane(); i < some; i += kWarp) to[begin + i] = from[begin + i];
}

// Columns of a matrix that a warp takes; a lane has some of them. In place of columns
// behind the last one it reads the last one.
constexpr int kColumnsOfLane = 2, kColumnsOfWarp = kColumnsOfLane * kWarp;

__device__ inline int64_t ColumnOfLane(int64_t place, int i) {
  return place * kColumnsOfWarp + i * kWarp + Lane();
}

// The warps of a tensor, if each takes `rows` rows of a matrix.
inline int64_t TilesOf(const MatrixTensor& tensor, int64_t rows) {
  if (tensor.columns == 0) return CeilDiv(tensor.rows, kOthers);
  return CeilDiv(tensor.rows, rows) * CeilDiv(tensor.columns, kColumnsOfWarp);
}

// -- M Q --------------------------------------------------------------------------

// Half a warp has the lanes of some rows.
constexpr int kHalves = kThreads / kLanesOfSum;
template <int kTile>
constexpr int kRowsOfHalf = kTile == 4 ? 4 : 2;
// Rows of the factor in shared memory.
constexpr int kRowsKept = 512;

template <int kTile>
__global__ void __launch_bounds__(kThreads)
    MultiplyMatricesKernel(MultiplyMatrices args, Tensors tensors) {
  constexpr int kRows = kRowsOfHalf<kTile>;
  // An odd number of four columns, or lanes would read from the same banks.
  alignas(16) __shared__ float factors[kRowsKept][kTile | 4];
  const int64_t tiles = tensors.tiles[tensors.count], rank = args.rank;
  const int lane = Lane() % kLanesOfSum;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int index = tensors.Of(tile);
    const MatrixTensor& tensor = tensors.tensors[index];
    const int64_t half =
        (tile - tensors.tiles[index]) * kHalves + threadIdx.x / kLanesOfSum;
    const float* rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      // In place of a row behind the last one, the last one again.
      const int64_t row = half * kRows + r;
      rows[r] = args.x.whole + tensor.element +
                (row < tensor.rows ? row : tensor.rows - 1) * tensor.columns;
    }
    for (int64_t k0 = 0; k0 < rank; k0 += kTile) {
      float totals[kRows][kTile] = {}, sums[kRows][kTile] = {};
      for (int64_t first = 0; first < tensor.columns; first += kRowsKept) {
        const int64_t left = tensor.columns - first;
        const int count = left < kRowsKept ? static_cast<int>(left) : kRowsKept;
        __syncthreads();
        CopyFactor<kTile>(args.right + tensor.right + first * rank, rank, k0, count, 0,
                          threadIdx.x, kThreads, factors);
        __syncthreads();
#pragma unroll 4
        for (int j = lane; j < count; j += kLanesOfSum) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const float x = rows[r][first + j];
#pragma unroll
            for (int k = 0; k < kTile; ++k) {
              sums[r][k] = __fadd_rn(sums[r][k], __fmul_rn(x, factors[j][k]));
            }
          }
        }
        const int64_t next = first + kRowsKept;
        if (next % kLaneChunk != 0 && next < tensor.columns) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int k = 0; k < kTile; ++k) {
            totals[r][k] = __fadd_rn(totals[r][k], sums[r][k]);
            sums[r][k] = 0;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = half * kRows + r;
        const bool writes = lane == 0 && row < tensor.rows;
        float* const to = args.products + tensor.left + row * rank + k0;
#pragma unroll
        for (int k = 0; k < kTile; ++k) {
          if (k0 + k >= rank) break;
          const float sum = AddLanes(totals[r][k]);
          if (writes) to[k] = sum;
        }
      }
    }
  }
}

// -- M^T P ------------------------------------------------------------------------

// A warp adds up kLaneSteps rows. If a matrix has more of them, its sums are added in
// their order by another kernel: scratch memory has a row of sums for each of these
// chunks of rows and each column of the factor.
__device__ inline int64_t SumsOf(const MatrixTensor& tensor, int64_t rank) {
  return tensor.element * rank / kLaneSteps + tensor.right;
}

template <int kTile>
__global__ void __launch_bounds__(kThreads)
    MultiplyTransposedKernel(MultiplyTransposed args, Tensors tensors) {
  alignas(16) __shared__ float parts[kWarpsPerBlock][kLaneSteps][kTile];
  float (*const factors)[kTile] = parts[WarpInBlock()];
  const int64_t tiles = tensors.tiles[tensors.count], rank = args.rank;
  for (int64_t tile = FirstTile(); tile < tiles; tile += TileStride()) {
    const int index = tensors.Of(tile);
    const MatrixTensor& tensor = tensors.tensors[index];
    const int64_t place = tile - tensors.tiles[index], columns = tensor.columns;
    const float* const x = args.x.whole + tensor.element;
    float* const to = args.factors + tensor.value;
    if (columns == 0) {
      CopyOthers(x, place, tensor.rows, to);
      continue;
    }
    const int64_t across = CeilDiv(columns, kColumnsOfWarp);
    const int64_t chunk = place / across, row = chunk * kLaneSteps;
    const int64_t left = tensor.rows - row;
    const int rows = left < kLaneSteps ? static_cast<int>(left) : kLaneSteps;
    int64_t own[kColumnsOfLane];
    for (int c = 0; c < kColumnsOfLane; ++c) own[c] = ColumnOfLane(place % across, c);
    for (int64_t first = 0; first < rank; first += kTile) {
      __syncwarp();
      CopyFactor<kTile>(args.left + tensor.left + row * rank, rank, first, rows, 0,
                        Lane(), kWarp, factors);
      __syncwarp();
      const float* from[kColumnsOfLane];
      for (int c = 0; c < kColumnsOfLane; ++c) {
        from[c] = x + row * columns + (own[c] < columns ? own[c] : columns - 1);
      }
      float sums[kColumnsOfLane][kTile] = {};
#pragma unroll 8
      for (int r = 0; r < rows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumnsOfLane; ++c) {
          const float value = *from[c];
          from[c] += columns;
#pragma unroll
          for (int k = 0; k < kTile; ++k) {
            sums[c][k] = __fadd_rn(sums[c][k], __fmul_rn(value, factors[r][k]));
          }
        }
      }
      float* const row_of_sums =
          args.scratch + SumsOf(tensor, rank) + (chunk * rank + first) * columns;
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
#pragma unroll
        for (int k = 0; k < kTile; ++k) {
          if (own[c] >= columns || first + k >= rank) continue;
          if (tensor.rows <= kLaneSteps) {
            to[own[c] * rank + first + k] = sums[c][k];
          } else {
            row_of_sums[k * columns + own[c]] = sums[c][k];
          }
        }
      }
    }
  }
}

// A tile is a thread block's: kWarp columns of a matrix, and one of the factor. While a
// warp adds, the others read what it will add next.
__global__ void __launch_bounds__(kThreads)
    AddChunksKernel(MultiplyTransposed args, Tensors tensors) {
  constexpr int kAtOnce = 16, kParts = (kWarpsPerBlock - 1) * kAtOnce;
  __shared__ float parts[2][kParts][kWarp];
  const int64_t tiles = tensors.tiles[tensors.count], rank = args.rank;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int index = tensors.Of(tile);
    const MatrixTensor& tensor = tensors.tensors[index];
    const int64_t place = tile - tensors.tiles[index], columns = tensor.columns;
    const int64_t k = place % rank, column = place / rank * kWarp + Lane();
    const int64_t own = column < columns ? column : columns - 1;
    const float* const sums = args.scratch + SumsOf(tensor, rank) + k * columns + own;
    const int64_t chunks = CeilDiv(tensor.rows, kLaneSteps);
    const int64_t rounds = CeilDiv(chunks, kParts);
    float total = 0;
    for (int64_t round = 0; round <= rounds; ++round) {
      if (WarpInBlock() > 0) {
        const int first = (WarpInBlock() - 1) * kAtOnce;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int64_t chunk = round * kParts + first + i;
          parts[round % 2][first + i][Lane()] =
              chunk < chunks ? sums[chunk * rank * columns] : 0;
        }
      } else if (round > 0) {
#pragma unroll 16
        for (int part = 0; part < kParts; ++part) {
          total = __fadd_rn(total, parts[(round - 1) % 2][part][Lane()]);
        }
      }
      __syncthreads();
    }
    if (WarpInBlock() == 0 && column < columns) {
      args.factors[tensor.value + column * rank + k] = total;
    }
  }
}

// -- P Q^T ------------------------------------------------------------------------

// Rows that a warp writes: it reads the factor on the right once.
constexpr int kRowsOfTile = 64;

template <int kTile>
__global__ void __launch_bounds__(kThreads)
    MultiplyFactorsKernel(MultiplyFactors args, Tensors tensors) {
  alignas(16) __shared__ float parts[kWarpsPerBlock][kRowsOfTile][kTile];
  float (*const lefts)[kTile] = parts[WarpInBlock()];
  const int64_t tiles = tensors.tiles[tensors.count], rank = args.rank;
  for (int64_t tile = FirstTile(); tile < tiles; tile += TileStride()) {
    const int index = tensors.Of(tile);
    const MatrixTensor& tensor = tensors.tensors[index];
    const int64_t place = tile - tensors.tiles[index], columns = tensor.columns;
    const float* const right = args.right + tensor.value;
    if (columns == 0) {
      CopyOthers(right, place, tensor.rows, args.values.whole + tensor.element);
      continue;
    }
    const int64_t across = CeilDiv(columns, kColumnsOfWarp);
    const int64_t row = place / across * kRowsOfTile, left = tensor.rows - row;
    const int rows = left < kRowsOfTile ? static_cast<int>(left) : kRowsOfTile;
    for (int64_t first = 0; first < rank; first += kTile) {
      // To add -0 changes no sum: it is 1 times -0 in columns that do not exist, and
      // the beginning of each sum.
      __syncwarp();
      CopyFactor<kTile>(args.left + tensor.left + row * rank, rank, first, rows, 1,
                        Lane(), kWarp, lefts);
      __syncwarp();
      float rights[kColumnsOfLane][kTile];
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
        const int64_t column = ColumnOfLane(place % across, c);
#pragma unroll
        for (int k = 0; k < kTile; ++k) {
          const bool exists = column < columns && first + k < rank;
          rights[c][k] = exists ? right[column * rank + first + k] : -0.0f;
        }
      }
      bool exists[kColumnsOfLane];
      for (int c = 0; c < kColumnsOfLane; ++c) {
        exists[c] = ColumnOfLane(place % across, c) < columns;
      }
      float* values = args.values.whole + tensor.element + row * columns +
                      ColumnOfLane(place % across, 0);
#pragma unroll 4
      for (int r = 0; r < rows; ++r, values += columns) {
        float sums[kColumnsOfLane];
#pragma unroll
        for (int c = 0; c < kColumnsOfLane; ++c) {
          sums[c] = first > 0 && exists[c] ? values[c * kWarp] : -0.0f;
#pragma unroll
          for (int k = 0; k < kTile; ++k) {
            sums[c] = __fadd_rn(sums[c], __fmul_rn(lefts[r][k], rights[c][k]));
          }
        }
#pragma unroll
        for (int c = 0; c < kColumnsOfLane; ++c) {
          if (exists[c]) values[c * kWarp] = sums[c];
        }
      }
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const MultiplyMatrices& args) {
  return LaunchByRank(args.rank, [&](auto rank_tile) {
    constexpr int kTile = decltype(rank_tile)::kColumns;
    return LaunchTensors(
        args,
        [](const MatrixTensor& t) {
          return t.columns == 0 ? 0 : CeilDiv(t.rows, kHalves * kRowsOfHalf<kTile>);
        },
        [&](const Tensors& tensors, int64_t tiles) {
          return LaunchBlocks(gpu, tiles, kThreads, MultiplyMatricesKernel<kTile>, args,
                              tensors);
        });
  });
}

const char* Run(const Gpu& gpu, const MultiplyTransposed& args) {
  const char* error = LaunchByRank(args.rank, [&](auto rank_tile) {
    constexpr int kTile = decltype(rank_tile)::kColumns;
    return LaunchTensors(
        args, [](const MatrixTensor& t) { return TilesOf(t, kLaneSteps); },
        [&](const Tensors& tensors, int64_t tiles) {
          return Launch(gpu, tiles, MultiplyTransposedKernel<kTile>, args, tensors);
        });
  });
  if (error != nullptr) return error;
  return LaunchTensors(
      args,
      [&](const MatrixTensor& t) {
        return t.rows <= kLaneSteps ? 0 : CeilDiv(t.columns, kWarp) * args.rank;
      },
      [&](const Tensors& tensors, int64_t tiles) {
        return LaunchBlocks(gpu, tiles, kThreads, AddChunksKernel, args, tensors);
      });
}

const char* Run(const Gpu& gpu, const MultiplyFactors& args) {
  return LaunchByRank(args.rank, [&](auto rank_tile) {
    constexpr int kTile = decltype(rank_tile)::kColumns;
    return LaunchTensors(
        args, [](const MatrixTensor& t) { return TilesOf(t, kRowsOfTile); },
        [&](const Tensors& tensors, int64_t tiles) {
          return Launch(gpu, tiles, MultiplyFactorsKernel<kTile>, args, tensors);
        });
  });
}

}  // namespace tfgradcomp
