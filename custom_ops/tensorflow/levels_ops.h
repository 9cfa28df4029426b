// The ops for levels: their arguments and static shapes. Only ops.cc includes this
// file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LEVELS_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LEVELS_OPS_H_

#include <cstdint>
#include <string>

#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

inline absl::Status FindLevelsShape(InferenceContext* c) {
  std::string rule;
  int64_t count, sweeps;
  LevelRule unused;
  TF_RETURN_IF_ERROR(c->GetAttr("rule", &rule));
  TF_RETURN_IF_ERROR(GetInt(c, "count", &count));
  TF_RETURN_IF_ERROR(GetInt(c, "sweeps", &sweeps));
  TF_RETURN_IF_ERROR(CheckRule(rule, count, sweeps, &unused));
  DimensionHandle size, num_blocks;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(Blocks(c, parts, &num_blocks));
  c->set_output(0, c->Matrix(num_blocks, c->MakeDim(count)));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>FindLevels")
    .Input("x: num_parts * float")
    .Input("row_splits: int64")
    .Output("levels: float")
    .Output("nonfinite: int64")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("rule: string")
    .Attr("count: int")
    .Attr("sweeps: int")
    .SetShapeFn(FindLevelsShape);

inline absl::Status PackLevelsShape(InferenceContext* c) {
  DimensionHandle size, num_blocks;
  ShapeHandle levels;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(Blocks(c, parts + 1, &num_blocks));
  TF_RETURN_IF_ERROR(CheckStreams(c, parts + 2));
  TF_RETURN_IF_ERROR(
      c->Merge(c->input(parts), c->Matrix(num_blocks, c->UnknownDim()), &levels));
  const DimensionHandle count = c->Dim(levels, 1);
  c->set_output(0, c->Vector(c->UnknownDim()));
  if (!c->ValueKnown(count)) return absl::OkStatus();
  const bool draws = c->num_inputs() > parts + 2;
  TF_RETURN_IF_ERROR(CheckLevelCount(draws ? 2 : 3, c->Value(count)));
  c->set_output(0, c->Vector(Words(c, size, c->Value(count) - (draws ? 0 : 1))));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackLevels")
    .Input("x: num_parts * float")
    .Input("levels: float")
    .Input("row_splits: int64")
    .Input("stream: num_streams * int64")
    .Output("words: int32")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_streams: int >= 0")
    .SetShapeFn(PackLevelsShape);

inline absl::Status MeanOfLevelsShape(InferenceContext* c) {
  int64_t count;
  DimensionHandle num_workers = c->UnknownDim(), num_blocks;
  ShapeHandle levels;
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 3, &levels));
  const DimensionHandle base = c->Dim(levels, 2);
  if (c->ValueKnown(base)) {
    TF_RETURN_IF_ERROR(CheckLevelCount(2, c->Value(base)));
    TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, c->Value(base), &num_workers));
  }
  TF_RETURN_IF_ERROR(Blocks(c, 2, &num_blocks));
  TF_RETURN_IF_ERROR(
      c->Merge(levels, c->MakeShape({num_workers, num_blocks, base}), &levels));
  return SetParts(c, count);
}

REGISTER_OP("Tfgradcomp>MeanOfLevels")
    .Input("words: int32")
    .Input("levels: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfLevelsShape);

REGISTER_OP("Tfgradcomp>ApplyMeanOfLevels")
    .Input("words: int32")
    .Input("levels: float")
    .Input("row_splits: int64")
    .TFGRADCOMP_UPDATES.Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfLevelsShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LEVELS_OPS_H_
