// The ops for factors of matrices: their arguments and static shapes. Only ops.cc
// includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LOW_RANK_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LOW_RANK_OPS_H_

#include <cstdint>
#include <vector>

#include "../matrices.h"
#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

// The attributes of an op on matrices.
#define TFGRADCOMP_MATRICES \
  Attr("rows: list(int)").Attr("columns: list(int)").Attr("rank: int")

// Reads the tensors' shapes and the rank, and returns the sizes of the arrays.
inline absl::Status GetMatrices(InferenceContext* c, MatrixTensor* sizes) {
  std::vector<int64_t> rows, columns;
  int64_t rank;
  TF_RETURN_IF_ERROR(c->GetAttr("rows", &rows));
  TF_RETURN_IF_ERROR(c->GetAttr("columns", &columns));
  TF_RETURN_IF_ERROR(GetInt(c, "rank", &rank));
  return CheckMatrices(rows, columns, rank, sizes);
}

// Checks that input `index` is a vector of `size` elements.
inline absl::Status CheckVector(InferenceContext* c, int index, int64_t size) {
  DimensionHandle dimension = c->MakeDim(size);
  return MergeVector(c, index, &dimension);
}

// Reads the sizes of the arrays, checks x, whose parts are the first inputs, and reads
// their number.
inline absl::Status GetMatricesOfParts(InferenceContext* c, MatrixTensor* sizes,
                                       int* num_parts) {
  DimensionHandle found, unused;
  TF_RETURN_IF_ERROR(GetMatrices(c, sizes));
  TF_RETURN_IF_ERROR(JoinParts(c, &found, num_parts));
  return c->Merge(found, c->MakeDim(sizes->element), &unused);
}

inline absl::Status MultiplyMatricesShape(InferenceContext* c) {
  MatrixTensor sizes;
  int parts;
  TF_RETURN_IF_ERROR(GetMatricesOfParts(c, &sizes, &parts));
  TF_RETURN_IF_ERROR(CheckVector(c, parts, sizes.right));
  c->set_output(0, c->Vector(sizes.left));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>MultiplyMatrices")
    .Input("x: num_parts * float")
    .Input("right: float")
    .Output("products: float")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .TFGRADCOMP_MATRICES.SetShapeFn(MultiplyMatricesShape);

// Checks both factors of a product, from input `first` on, and reads the sizes.
inline absl::Status GetFactors(InferenceContext* c, int first, MatrixTensor* sizes) {
  TF_RETURN_IF_ERROR(GetMatrices(c, sizes));
  TF_RETURN_IF_ERROR(CheckVector(c, first, sizes->left));
  return CheckVector(c, first + 1, sizes->value);
}

inline absl::Status MultiplySumShape(InferenceContext* c) {
  MatrixTensor sizes;
  int parts;
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(GetMatricesOfParts(c, &sizes, &parts));
  TF_RETURN_IF_ERROR(CheckVector(c, parts, sizes.element));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(parts + 1), 0, &unused));
  TF_RETURN_IF_ERROR(GetFactors(c, parts + 2, &sizes));
  TF_RETURN_IF_ERROR(CheckVector(c, parts + 4, sizes.right));
  c->set_output(0, c->Vector(sizes.element));
  c->set_output(1, c->Vector(sizes.left));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>MultiplySum")
    .Input("x: num_parts * float")
    .Input("y: float")
    .Input("factor: float")
    .Input("left: float")
    .Input("right: float")
    .Input("query: float")
    .Output("total: float")
    .Output("products: float")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .TFGRADCOMP_MATRICES.SetShapeFn(MultiplySumShape);

inline absl::Status MultiplyTransposedShape(InferenceContext* c) {
  MatrixTensor sizes;
  int parts;
  TF_RETURN_IF_ERROR(GetMatricesOfParts(c, &sizes, &parts));
  TF_RETURN_IF_ERROR(CheckVector(c, parts, sizes.left));
  c->set_output(0, c->Vector(sizes.value));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>MultiplyTransposed")
    .Input("x: num_parts * float")
    .Input("left: float")
    .Output("factors: float")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .TFGRADCOMP_MATRICES.SetShapeFn(MultiplyTransposedShape);

inline absl::Status MultiplyFactorsShape(InferenceContext* c) {
  MatrixTensor sizes;
  TF_RETURN_IF_ERROR(GetFactors(c, 0, &sizes));
  return SetParts(c, sizes.element);
}

REGISTER_OP("Tfgradcomp>MultiplyFactors")
    .Input("left: float")
    .Input("right: float")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .TFGRADCOMP_MATRICES.SetShapeFn(MultiplyFactorsShape);

REGISTER_OP("Tfgradcomp>ApplyMultiplyFactors")
    .Input("left: float")
    .Input("right: float")
    .TFGRADCOMP_UPDATES.Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .TFGRADCOMP_MATRICES.SetShapeFn(MultiplyFactorsShape);

inline absl::Status SubtractFactorsShape(InferenceContext* c) {
  MatrixTensor sizes;
  TF_RETURN_IF_ERROR(GetFactors(c, 1, &sizes));
  TF_RETURN_IF_ERROR(CheckVector(c, 0, sizes.element));
  c->set_output(0, c->Vector(sizes.element));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>SubtractFactors")
    .Input("x: float")
    .Input("left: float")
    .Input("right: float")
    .Output("difference: float")
    .TFGRADCOMP_MATRICES.SetShapeFn(SubtractFactorsShape);

inline absl::Status OrthonormalizeShape(InferenceContext* c) {
  std::vector<int64_t> rows;
  int64_t rank, size;
  TF_RETURN_IF_ERROR(c->GetAttr("rows", &rows));
  TF_RETURN_IF_ERROR(GetInt(c, "rank", &rank));
  TF_RETURN_IF_ERROR(CheckFactors(rows, rank, &size));
  TF_RETURN_IF_ERROR(CheckVector(c, 0, size));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>Orthonormalize")
    .Input("x: float")
    .Output("basis: float")
    .Attr("rows: list(int)")
    .Attr("rank: int")
    .SetShapeFn(OrthonormalizeShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LOW_RANK_OPS_H_
