// Orthonormal columns of factors.
//
// A thread block has a chunk of a factor's rows. Its columns lie one after the other in
// scratch memory. All columns behind the one that becomes orthonormal are changed at
// once, each as it would be alone, in these steps:
//   0           reads the columns; dot products of each column with itself
//   2 k + 1     column k gets length 1; its dot products with the columns behind it
//   2 k + 2     these columns become orthogonal to it; dot product of column k + 1
// A step needs the dot products of the one before, of all chunks. So a launch takes a
// step, or all steps of factors that are one chunk.

#include "tensors.h"

namespace tfgradcomp {
namespace {

class FactorChunk {
 public:
  __device__ FactorChunk(const Orthonormalize& args, const MatrixTensor& factor,
                         int64_t chunk)
      : args_(args),
        first_(factor.left),
        rows_(factor.rows),
        chunk_(chunk),
        chunks_(CeilDiv(rows_, kLaneChunk)),
        begin_(chunk * kLaneChunk),
        end_(begin_ + kLaneChunk < rows_ ? begin_ + kLaneChunk : rows_),
        columns_(args.scratch + first_),
        squares_(args.scratch + args.size +
                 2 * args.rank * factor.chunks * kLanesOfSum),
        products_(squares_ + args.rank * chunks_ * kLanesOfSum) {}

  __device__ void Step(int64_t step) const {
    const int64_t k = (step - 1) / 2, rank = args_.rank;
    if (step == 0) {
      for (int64_t j = 0; j < rank; ++j) {
        EachRow([&](int64_t i) {
          columns_[j * rows_ + i] = args_.x[first_ + i * rank + j];
        });
      }
      __syncthreads();
      AddProducts(0, rank, [](int64_t j) { return j; }, squares_);
    } else if (step % 2 == 1) {
      MakeLengthOne(k);
      __syncthreads();
      AddProducts(k + 1, rank, [k](int64_t) { return k; }, products_);
    } else {
      for (int64_t j = k + 1; j < rank; j += kGroups) {
        MakeOrthogonal(k, j, j + kGroups < rank ? j + kGroups : rank);
      }
      // In the place of column k, whose products nobody needs any more.
      AddProducts(
          k + 1, k + 2, [](int64_t j) { return j; }, products_ - kLanesOfSum * chunks_);
    }
  }

 private:
  static constexpr int kGroups = kManyThreads / kLanesOfSum;

  template <typename Body>
  __device__ void EachRow(const Body& body) const {
    for (int64_t i = begin_ + threadIdx.x; i < end_; i += kManyThreads) body(i);
  }

  // The sum of value(i) for i < count in their order, several values at once, so that
  // the memory has enough to do. To add 0 does not change it.
  template <int kAtOnce, typename Value>
  static __device__ double Sum(int64_t count, const Value& value) {
    double sum = 0;
    for (int64_t first = 0; first < count; first += kAtOnce) {
      double values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        values[i] = first + i < count ? value(first + i) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum += values[i];
    }
    return sum;
  }

  // The chunk's dot products of the columns [first, last) with others. Each kLanesOfSum
  // threads have one of them at a time.
  template <typename Other>
  __device__ void AddProducts(int64_t first, int64_t last, const Other& other,
                              double* sums) const {
    const int lane = threadIdx.x % kLanesOfSum;
    for (int64_t j = first + threadIdx.x / kLanesOfSum; j < last; j += kGroups) {
      const double* const a = columns_ + other(j) * rows_;
      const double* const b = columns_ + j * rows_;
      const double sum =
          Sum<8>(CeilDiv(end_ - begin_ - lane, kLanesOfSum), [&](int64_t step) {
            const int64_t i = begin_ + lane + step * kLanesOfSum;
            return a[i] * b[i];
          });
      sums[(j * chunks_ + chunk_) * kLanesOfSum + lane] = sum;
    }
  }

  // The sum over all chunks, in each thread of half a warp.
  __device__ double Total(const double* sums, int64_t j) const {
    sums += j * chunks_ * kLanesOfSum + threadIdx.x % kLanesOfSum;
    return AddLanes(
        Sum<16>(chunks_, [=](int64_t chunk) { return sums[chunk * kLanesOfSum]; }));
  }

  __device__ void MakeLengthOne(int64_t k) const {
    __shared__ double lengths[2];  // As it is, and as it was.
    if (WarpInBlock() == 0) {
      const int half = Lane() / kLanesOfSum;
      const bool changed = half == 0 && k > 0;
      const double total = Total(changed ? products_ : squares_, changed ? k - 1 : k);
      if (Lane() % kLanesOfSum == 0) lengths[half] = sqrt(total);
    }
    __syncthreads();
    const double length = lengths[0];
    const bool depends = length <= 1e-10 * lengths[1];
    double* const column = columns_ + k * rows_;
    EachRow([&](int64_t i) {
      const double x = depends ? 0 : column[i] / length;
      column[i] = x;
      args_.basis[first_ + i * args_.rank + k] = static_cast<float>(x);
    });
  }

  // Makes the columns [first, last), at most kGroups, orthogonal to column k.
  __device__ void MakeOrthogonal(int64_t k, int64_t first, int64_t last) const {
    __shared__ double factors[kGroups];
    const int group = threadIdx.x / kLanesOfSum;
    if (first + WarpInBlock() * 2 < last) {
      const int64_t own = first + group < last ? first + group : last - 1;
      const double total = Total(products_, own);
      if (Lane() % kLanesOfSum == 0) factors[group] = total;
    }
    __syncthreads();
    constexpr int kAtOnce = 4;
    EachRow([&](int64_t i) {
      const double x = columns_[k * rows_ + i];
      for (int64_t j = first; j < last; j += kAtOnce) {
        double* const column = columns_ + j * rows_ + i;
        double values[kAtOnce];
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          values[c] = j + c < last ? column[c * rows_] : 0;
        }
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          if (j + c < last) column[c * rows_] = values[c] - factors[j - first + c] * x;
        }
      }
    });
    __syncthreads();
  }

  const Orthonormalize& args_;
  const int64_t first_, rows_, chunk_, chunks_, begin_, end_;
  double* const columns_;
  // By columns and chunks: their lanes' sums of squares of the columns as they were,
  // and of the products of the last step.
  double *const squares_, *const products_;
};

__global__ void __launch_bounds__(kManyThreads)
    OrthonormalizeKernel(Orthonormalize args, Tensors tensors, int64_t first,
                         int64_t last) {
  const int64_t tiles = tensors.tiles[tensors.count];
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int index = tensors.Of(tile);
    const FactorChunk chunk(args, tensors.tensors[index], tile - tensors.tiles[index]);
    for (int64_t step = first; step < last; ++step) {
      chunk.Step(step);
      __syncthreads();
    }
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const Orthonormalize& args) {
  struct {
    const int64_t *rows, *columns;
    int64_t num_tensors, rank;
  } factors = {args.rows, args.rows, args.num_factors, args.rank};
  const int64_t steps = 2 * args.rank;
  const char* error = LaunchTensors(
      factors, [](const MatrixTensor& t) { return t.rows <= kLaneChunk ? 1 : 0; },
      [&](const Tensors& tensors, int64_t tiles) {
        return LaunchBlocks(gpu, tiles, kManyThreads, OrthonormalizeKernel, args,
                            tensors, int64_t{0}, steps);
      });
  if (error != nullptr) return error;
  return LaunchTensors(
      factors,
      [](const MatrixTensor& t) {
        return t.rows <= kLaneChunk ? 0 : CeilDiv(t.rows, kLaneChunk);
      },
      [&](const Tensors& tensors, int64_t tiles) {
        const char* failed = nullptr;
        for (int64_t step = 0; step < steps && failed == nullptr; ++step) {
          failed = LaunchBlocks(gpu, tiles, kManyThreads, OrthonormalizeKernel, args,
                                tensors, step, step + 1);
        }
        return failed;
      });
}

}  // namespace tfgradcomp
