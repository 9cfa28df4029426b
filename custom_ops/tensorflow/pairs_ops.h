// The ops for single elements of a vector: their arguments and static shapes. Only
// ops.cc includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_PAIRS_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_PAIRS_OPS_H_

#include <cstdint>

#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

inline absl::Status FindLargestShape(InferenceContext* c) {
  DimensionHandle count;
  TF_RETURN_IF_ERROR(CheckScalar(c, c->num_inputs() - 1));
  TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(c->num_inputs() - 1, &count));
  c->set_output(0, c->Vector(count));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>FindLargest")
    .Input("x: num_parts * float")
    .Input("count: int32")
    .Output("indices: int32")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .SetShapeFn(FindLargestShape);

inline absl::Status ClearElementsShape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim(), count = c->UnknownDim();
  TF_RETURN_IF_ERROR(MergeVector(c, 0, &size));
  TF_RETURN_IF_ERROR(MergeVector(c, 1, &count));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>ClearElements")
    .Input("x: float")
    .Input("indices: int32")
    .Output("cleared: float")
    .SetShapeFn(ClearElementsShape);

inline absl::Status MeanOfPairsShape(InferenceContext* c) {
  int64_t count;
  ShapeHandle pairs;
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &pairs));
  TF_RETURN_IF_ERROR(c->Merge(pairs, c->input(1), &pairs));
  c->set_output(0, c->Vector(count));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>MeanOfPairs")
    .Input("indices: int32")
    .Input("values: float")
    .Output("mean: float")
    .Attr("count: int")
    .SetShapeFn(MeanOfPairsShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_PAIRS_OPS_H_
