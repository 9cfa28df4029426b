// The ops for error feedback with scaled signs: their arguments and static shapes.
// Only ops.cc includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ERROR_FEEDBACK_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ERROR_FEEDBACK_OPS_H_

#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

// Checks the common inputs of the server's ops: the words and scales that the workers
// sent, the residual and the ratio.
inline absl::Status ServerInputs(InferenceContext* c, int row_splits,
                                 DimensionHandle* size, DimensionHandle* num_blocks) {
  ShapeHandle sent;
  TF_RETURN_IF_ERROR(MergeVector(c, 2, size));
  TF_RETURN_IF_ERROR(
      c->Merge(c->input(0), c->Matrix(c->UnknownDim(), Words(c, *size, 2)), &sent));
  TF_RETURN_IF_ERROR(CheckScalar(c, 3));
  TF_RETURN_IF_ERROR(Blocks(c, row_splits, num_blocks));
  return WorkersScale(c, 1, c->Dim(sent, 0), *num_blocks);
}

inline absl::Status SignErrorFeedbackShape(InferenceContext* c) {
  DimensionHandle size, num_blocks;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(MergeVector(c, parts, &size));
  TF_RETURN_IF_ERROR(CheckScalar(c, parts + 1));
  TF_RETURN_IF_ERROR(CheckScalar(c, parts + 2));
  TF_RETURN_IF_ERROR(Blocks(c, parts + 3, &num_blocks));
  if (c->num_inputs() > parts + 4) {
    TF_RETURN_IF_ERROR(MergeVector(c, parts + 4, &size));
  }
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Vector(num_blocks));
  for (int i = 2; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>SignErrorFeedback")
    .Input("x: num_parts * float")
    .Input("residual: float")
    .Input("ratio: float")
    .Input("moving: bool")
    .Input("row_splits: int64")
    .Input("momentum: num_momenta * float")
    .Output("words: int32")
    .Output("scale: float")
    .Output("new_residual: float")
    .Output("new_momentum: num_momenta * float")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_momenta: int >= 0")
    .Attr("mu: float")
    .SetShapeFn(SignErrorFeedbackShape);

inline absl::Status MeanSignErrorFeedbackShape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim(), num_blocks;
  TF_RETURN_IF_ERROR(ServerInputs(c, 5, &size, &num_blocks));
  TF_RETURN_IF_ERROR(CheckScalar(c, 4));
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Vector(num_blocks));
  c->set_output(2, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>MeanSignErrorFeedback")
    .Input("sent_words: int32")
    .Input("sent_scale: float")
    .Input("residual: float")
    .Input("ratio: float")
    .Input("moving: bool")
    .Input("row_splits: int64")
    .Output("words: int32")
    .Output("scale: float")
    .Output("new_residual: float")
    .SetShapeFn(MeanSignErrorFeedbackShape);

inline absl::Status MeanSignSumsShape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim(), num_blocks;
  TF_RETURN_IF_ERROR(ServerInputs(c, 4, &size, &num_blocks));
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Vector(num_blocks));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>MeanSignSums")
    .Input("sent_words: int32")
    .Input("sent_scale: float")
    .Input("residual: float")
    .Input("ratio: float")
    .Input("row_splits: int64")
    .Output("words: int32")
    .Output("l1: double")
    .SetShapeFn(MeanSignSumsShape);

inline absl::Status MeanSignResidualShape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim(), num_blocks;
  TF_RETURN_IF_ERROR(ServerInputs(c, 7, &size, &num_blocks));
  TF_RETURN_IF_ERROR(CheckScalar(c, 4));
  DimensionHandle words = Words(c, size, 2);
  TF_RETURN_IF_ERROR(MergeVector(c, 5, &words));
  TF_RETURN_IF_ERROR(MergeVector(c, 6, &num_blocks));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>MeanSignResidual")
    .Input("sent_words: int32")
    .Input("sent_scale: float")
    .Input("residual: float")
    .Input("ratio: float")
    .Input("moving: bool")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .Output("new_residual: float")
    .SetShapeFn(MeanSignResidualShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ERROR_FEEDBACK_OPS_H_
