// The ops for updates by a vector, the search for NaN, and residuals: their arguments
// and static shapes. Only ops.cc includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_OPS_H_

#include "shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

REGISTER_OP("Tfgradcomp>ApplyVector")
    .Input("x: num_parts * float")
    .TFGRADCOMP_UPDATES.Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

inline absl::Status FirstNonfiniteShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckScalar(c, c->num_inputs() - 1));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>FirstNonfinite")
    .Input("x: num_parts * float")
    .Input("is_finite: bool")
    .Output("part: int32")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .SetShapeFn(FirstNonfiniteShape);

inline absl::Status AddScaledShape(InferenceContext* c) {
  DimensionHandle size;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(MergeVector(c, parts, &size));
  TF_RETURN_IF_ERROR(CheckScalar(c, parts + 1));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>AddScaled")
    .Input("x: num_parts * float")
    .Input("y: float")
    .Input("factor: float")
    .Output("total: float")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .SetShapeFn(AddScaledShape);

inline absl::Status RoundToBfloat16Shape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim();
  TF_RETURN_IF_ERROR(MergeVector(c, 0, &size));
  TF_RETURN_IF_ERROR(CheckStream(c, 1));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>RoundToBfloat16")
    .Input("x: float")
    .Input("stream: int64")
    .Output("rounded: bfloat16")
    .SetShapeFn(RoundToBfloat16Shape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_OPS_H_
