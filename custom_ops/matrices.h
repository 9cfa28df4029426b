// The tensors of a vector of matrices (kernels.h), on the host.

#ifndef TFGRADCOMP_CUSTOM_OPS_MATRICES_H_
#define TFGRADCOMP_CUSTOM_OPS_MATRICES_H_

#include <cstdint>

#include "kernels.h"

namespace tfgradcomp {
// For each file of its own, as word_format.h explains.
namespace {

// Products that the lanes of a sum add at a time.
constexpr int64_t kLaneChunk = kLanesOfSum * kLaneSteps;

constexpr int64_t ChunksOfRows(int64_t rows) {
  return (rows + kLaneChunk - 1) / kLaneChunk;
}

// A tensor, and where it begins in each array of a call.
struct MatrixTensor {
  int64_t rows, columns;
  int64_t element;  // In the vector.
  int64_t left;     // Its factor among the factors on the left,
  int64_t right;    // among those on the right,
  int64_t value;    // and among those on the right with other tensors between them.
  int64_t chunks;   // The chunks of kLaneChunk rows before it.

  int64_t elements() const { return columns == 0 ? rows : rows * columns; }
};

// Calls body(tensor, index) for each tensor. Returns the sizes of the arrays, as where
// one tensor more would begin.
template <typename Body>
MatrixTensor EachTensor(const int64_t* rows, const int64_t* columns,
                        int64_t num_tensors, int64_t rank, const Body& body) {
  MatrixTensor tensor = {};
  for (int64_t i = 0; i < num_tensors; ++i) {
    tensor.rows = rows[i];
    tensor.columns = columns[i];
    body(tensor, i);
    const bool is_matrix = tensor.columns != 0;
    tensor.element += tensor.elements();
    tensor.left += is_matrix ? tensor.rows * rank : 0;
    tensor.right += tensor.columns * rank;
    tensor.value += is_matrix ? tensor.columns * rank : tensor.rows;
    tensor.chunks += is_matrix ? ChunksOfRows(tensor.rows) : 0;
  }
  return tensor;
}

template <typename Args>
MatrixTensor SizesOf(const Args& args) {
  return EachTensor(args.rows, args.columns, args.num_tensors, args.rank,
                    [](const MatrixTensor&, int64_t) {});
}

// Of sums of kLaneSteps rows, which only a GPU keeps.
inline int64_t ScratchOf(const MultiplyTransposed& args) {
  const MatrixTensor sizes = SizesOf(args);
  return sizes.element * args.rank / kLaneSteps + sizes.right;
}

// Columns, each filled up to kLanesOfSum elements; and for each chunk of a column, two
// sums by lanes, which only a GPU keeps.
inline int64_t ScratchOf(const Orthonormalize& args) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < args.num_factors; ++i) chunks += ChunksOfRows(args.rows[i]);
  return args.size + (kLanesOfSum - 1) * args.num_factors * args.rank +
         2 * kLanesOfSum * chunks * args.rank;
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_MATRICES_H_
