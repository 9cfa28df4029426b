// The ops for signs: their arguments and static shapes. Only ops.cc includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SIGNS_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SIGNS_OPS_H_

#include <cstdint>

#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

inline absl::Status PackSignsShape(InferenceContext* c) {
  DimensionHandle size;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(CheckStreams(c, parts));
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackSigns")
    .Input("x: num_parts * float")
    .Input("stream: num_streams * int64")
    .Output("words: int32")
    .Output("nonfinite: int64")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_streams: int >= 0")
    .SetShapeFn(PackSignsShape);

inline absl::Status PackMomentumSignsShape(InferenceContext* c) {
  DimensionHandle size;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(MergeVector(c, parts, &size));
  TF_RETURN_IF_ERROR(CheckScalar(c, parts + 1));
  TF_RETURN_IF_ERROR(CheckStreams(c, parts + 2));
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Vector(size));
  c->set_output(2, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackMomentumSigns")
    .Input("x: num_parts * float")
    .Input("momentum: float")
    .Input("warming_up: bool")
    .Input("stream: num_streams * int64")
    .Output("words: int32")
    .Output("new_momentum: float")
    .Output("nonfinite: int64")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_streams: int >= 0")
    .Attr("beta: float")
    .Attr("one_minus_beta: float")
    .SetShapeFn(PackMomentumSignsShape);

inline absl::Status MeanOfSignsShape(InferenceContext* c) {
  int64_t count;
  DimensionHandle num_workers, num_blocks;
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, 2, &num_workers));
  TF_RETURN_IF_ERROR(Blocks(c, 2, &num_blocks));
  TF_RETURN_IF_ERROR(WorkersScale(c, 1, num_workers, num_blocks));
  return SetParts(c, count);
}

REGISTER_OP("Tfgradcomp>MeanOfSigns")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfSignsShape);

REGISTER_OP("Tfgradcomp>ApplyMeanOfSigns")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .TFGRADCOMP_UPDATES.Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfSignsShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SIGNS_OPS_H_
