// The kernels of matrices and their factors of few columns, as kernels.h has the
// others.

#ifndef TFGRADCOMP_CUSTOM_OPS_LOW_RANK_H_
#define TFGRADCOMP_CUSTOM_OPS_LOW_RANK_H_

#include <cstdint>

#include "vectors.h"

namespace tfgradcomp {

// Products of matrices with factors of few columns. Tensor t of the vector is a matrix
// of rows[t] > 0 rows and columns[t] columns, row by row; or, if columns[t] is 0,
// rows[t] other elements. Each matrix has a factor on its left (rows[t] rows) or on its
// right (columns[t] rows), of `rank` columns, row by row; the factors of all matrices
// follow each other. `rows` and `columns` are in the memory of the host, on a GPU, too.
//
// The sum of n products by L lanes: product i is one of lane i % L. A lane adds its
// products in their order, kLaneSteps at a time, beginning with 0; then these sums in
// their order, beginning with 0. Then lanes l and l + L / 2 are added, and so on.
constexpr int kLanesOfSum = 16;  // L, unless the text states otherwise.
constexpr int kLaneSteps = 64;

// products = M Q of each matrix M, where Q is its factor on the right.
struct MultiplyMatrices {
  CutVector<const float> x;
  int64_t size;
  const int64_t* rows;     // [num_tensors]
  const int64_t* columns;  // [num_tensors]
  int64_t num_tensors;
  const float* right;  // [sum of columns, rank]
  int64_t rank;
  float* products;  // [sum of the matrices' rows, rank]
};

// factors = M^T P of each matrix M, where P is its factor on the left, by sums of one
// lane; the other elements between them, as they are.
struct MultiplyTransposed {
  CutVector<const float> x;
  int64_t size;
  const int64_t* rows;     // [num_tensors]
  const int64_t* columns;  // [num_tensors]
  int64_t num_tensors;
  const float* left;  // [sum of the matrices' rows, rank]
  int64_t rank;
  float* scratch;  // [ScratchOf(args)], of matrices.h; on a CPU unused
  float* factors;  // [sum of columns * rank, or of rows for other tensors]
};

// values = P Q^T for each matrix; the other elements between them, as they are. An
// element is the sum of `rank` products in their order, beginning with the first one.
struct MultiplyFactors {
  const float* left;   // As for MultiplyTransposed.
  const float* right;  // As MultiplyTransposed writes `factors`.
  int64_t size;
  const int64_t* rows;     // [num_tensors]
  const int64_t* columns;  // [num_tensors]
  int64_t num_tensors;
  int64_t rank;
  CutVector<float> values;
  const Update* update = nullptr;  // Or null: the values are written.
};

// difference = x - P Q^T for each matrix, and x less the other elements. On a CPU only.
struct SubtractFactors {
  const float *x, *left, *right;  // The last two as for MultiplyFactors.
  int64_t size;
  const int64_t *rows, *columns;  // [num_tensors]
  int64_t num_tensors;
  int64_t rank;
  float* difference;  // May be x.
};

// total = x + factor * (y - P R^T) for each matrix, where P and R are its factors as
// for MultiplyFactors; other elements likewise. Each operation is rounded. And
// products = M Q of each matrix M of the total. On a CPU only.
struct MultiplySum {
  CutVector<const float> x;
  const float *y, *factor;  // A scalar.
  const float *left, *right;
  int64_t size;
  const int64_t *rows, *columns;  // [num_tensors]
  int64_t num_tensors;
  const float* query;  // Q, as MultiplyMatrices has it on the right.
  int64_t rank;
  float* total;  // [size]
  float* products;
};

// Orthonormal columns that span those of each of `num_factors` factors, in float64:
// for each column v, for each earlier column b of the result, v = v - (b^T v) b; then
// v = v / sqrt(v^T v), or 0 if that length is at most 1e-10 of the column's at first.
struct Orthonormalize {
  const float* x;  // [sum of rows, rank]
  int64_t size;
  const int64_t* rows;  // [num_factors], in the memory of the host
  int64_t num_factors;
  int64_t rank;
  double* scratch;  // [ScratchOf(args)], of matrices.h
  float* basis;     // [size]
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_LOW_RANK_H_
