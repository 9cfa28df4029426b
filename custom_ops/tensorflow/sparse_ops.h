// The ops for sparse words: their arguments and static shapes. Only ops.cc includes
// this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SPARSE_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SPARSE_OPS_H_

#include <cstdint>

#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

// Checks the common inputs of the ops that pack sparse words: x, moments and the
// residual.
// `*next` becomes the input after them.
inline absl::Status Gathered(InferenceContext* c, DimensionHandle* size, int* next) {
  DimensionHandle moments;
  float alpha, decay;
  int parts, more;
  TF_RETURN_IF_ERROR(c->GetAttr("alpha", &alpha));
  TF_RETURN_IF_ERROR(c->GetAttr("decay", &decay));
  TF_RETURN_IF_ERROR(CheckVariance(alpha, decay));
  TF_RETURN_IF_ERROR(JoinParts(c, size, &parts));
  TF_RETURN_IF_ERROR(c->GetAttr("num_moments", &more));
  *next = parts + more + 1;
  if (more > 0) {
    TF_RETURN_IF_ERROR(AddElements(c, parts, parts + more, &moments));
    TF_RETURN_IF_ERROR(c->Merge(*size, moments, size));
  }
  TF_RETURN_IF_ERROR(MergeVector(c, *next - 1, size));
  return c->ValueKnown(*size) ? CheckSparseSize(c->Value(*size)) : absl::OkStatus();
}

inline absl::Status PackUnambiguousShape(InferenceContext* c) {
  DimensionHandle size, num_blocks;
  int next;
  TF_RETURN_IF_ERROR(Gathered(c, &size, &next));
  TF_RETURN_IF_ERROR(MergeVector(c, next, &size));
  TF_RETURN_IF_ERROR(Blocks(c, next + 1, &num_blocks));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector(num_blocks));
  c->set_output(2, c->Vector(size));
  c->set_output(3, c->Vector(size));
  c->set_output(4, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackUnambiguous")
    .Input("x: num_parts * float")
    .Input("moments: num_moments * float")
    .Input("residual: float")
    .Input("variance: float")
    .Input("row_splits: int64")
    .Output("words: int32")
    .Output("exponents: int8")
    .Output("new_residual: float")
    .Output("new_variance: float")
    .Output("nonfinite: int64")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_moments: int >= 1")
    .Attr("moments_scale: float = 1.0")
    .Attr("alpha: float")
    .Attr("decay: float")
    .SetShapeFn(PackUnambiguousShape);

inline absl::Status PackOverThresholdShape(InferenceContext* c) {
  DimensionHandle size, num_blocks;
  int next;
  TF_RETURN_IF_ERROR(Gathered(c, &size, &next));
  const int last = c->num_inputs() - 1;
  if (last - 1 > next) TF_RETURN_IF_ERROR(MergeVector(c, next, &size));
  TF_RETURN_IF_ERROR(Blocks(c, last, &num_blocks));
  TF_RETURN_IF_ERROR(MergeVector(c, last - 1, &num_blocks));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector(size));
  c->set_output(2, c->Scalar());
  for (int i = 3; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackOverThreshold")
    .Input("x: num_parts * float")
    .Input("moments: num_moments * float")
    .Input("residual: float")
    .Input("variance: num_variances * float")
    .Input("threshold: float")
    .Input("row_splits: int64")
    .Output("words: int32")
    .Output("new_residual: float")
    .Output("nonfinite: int64")
    .Output("new_variance: num_variances * float")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_moments: int >= 0")
    .Attr("moments_scale: float = 1.0")
    .Attr("num_variances: int >= 0")
    .Attr("alpha: float")
    .Attr("decay: float")
    .SetShapeFn(PackOverThresholdShape);

inline absl::Status MeanOfSparseShape(InferenceContext* c) {
  int64_t count;
  DimensionHandle num_blocks;
  ShapeHandle words;
  TF_RETURN_IF_ERROR(GetInt(c, "count", &count));
  TF_RETURN_IF_ERROR(CheckSparseSize(count));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &words));
  TF_RETURN_IF_ERROR(Blocks(c, 2, &num_blocks));
  TF_RETURN_IF_ERROR(WorkersScale(c, 1, c->Dim(words, 0), num_blocks));
  return SetParts(c, count);
}

REGISTER_OP("Tfgradcomp>MeanOfSparse")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfSparseShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SPARSE_OPS_H_
