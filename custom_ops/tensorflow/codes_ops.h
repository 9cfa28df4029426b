// The ops for codes and their words: their arguments and static shapes. Only ops.cc
// includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CODES_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CODES_OPS_H_

#include <cstdint>
#include <vector>

#include "../word_format.h"
#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

inline absl::Status PackCodesShape(InferenceContext* c) {
  int64_t base;
  DimensionHandle size = c->UnknownDim();
  TF_RETURN_IF_ERROR(GetBase(c, &base));
  TF_RETURN_IF_ERROR(MergeVector(c, 0, &size));
  c->set_output(0, c->Vector(Words(c, size, base)));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackCodes")
    .Input("codes: int32")
    .Output("words: int32")
    .Attr("base: int")
    .SetShapeFn(PackCodesShape);

inline absl::Status UnpackCodesShape(InferenceContext* c) {
  int64_t base, count;
  ShapeHandle words, rows, codes;
  DimensionHandle unused;
  TF_RETURN_IF_ERROR(GetBase(c, &base));
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &words));
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(words, -1),
                                  tfgradcomp_format::WordsFor(count, base), &unused));
  TF_RETURN_IF_ERROR(c->Subshape(words, 0, -1, &rows));
  TF_RETURN_IF_ERROR(c->Concatenate(rows, c->Vector(count), &codes));
  c->set_output(0, codes);
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>UnpackCodes")
    .Input("words: int32")
    .Output("codes: int32")
    .Attr("base: int")
    .Attr("count: int")
    .SetShapeFn(UnpackCodesShape);

inline absl::Status PackTernaryShape(InferenceContext* c) {
  DimensionHandle size, num_blocks;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(Blocks(c, parts + 2, &num_blocks));
  TF_RETURN_IF_ERROR(MergeVector(c, parts, &num_blocks));
  TF_RETURN_IF_ERROR(MergeVector(c, parts + 1, &num_blocks));
  TF_RETURN_IF_ERROR(CheckStream(c, parts + 3));
  c->set_output(0, c->Vector(Words(c, size, 3)));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackTernary")
    .Input("x: num_parts * float")
    .Input("limit: float")
    .Input("scale: float")
    .Input("row_splits: int64")
    .Input("stream: int64")
    .Output("words: int32")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .SetShapeFn(PackTernaryShape);

inline absl::Status SumCodesShape(InferenceContext* c) {
  int64_t base, count;
  DimensionHandle num_workers;
  TF_RETURN_IF_ERROR(GetBase(c, &base));
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, base, &num_workers));
  if (!c->ValueKnown(num_workers)) {
    c->set_output(0, c->Vector(c->UnknownDim()));
    return absl::OkStatus();
  }
  int64_t sum_base = 0;
  std::vector<int64_t> given;
  TF_RETURN_IF_ERROR(c->GetAttr("sum_base", &given));
  TF_RETURN_IF_ERROR(BaseOfSum(c->Value(num_workers), base, given, &sum_base));
  c->set_output(0, c->Vector(tfgradcomp_format::WordsFor(count, sum_base)));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>SumCodes")
    .Input("words: int32")
    .Output("sum: int32")
    .Attr("base: int")
    .Attr("count: int")
    .Attr("sum_base: list(int)")
    .SetShapeFn(SumCodesShape);

inline absl::Status SumLevelsShape(InferenceContext* c) {
  int64_t base, count;
  DimensionHandle num_workers, num_blocks;
  TF_RETURN_IF_ERROR(GetBase(c, &base));
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, base, &num_workers));
  TF_RETURN_IF_ERROR(Blocks(c, 2, &num_blocks));
  TF_RETURN_IF_ERROR(MergeVector(c, 1, &num_blocks));
  return SetParts(c, count);
}

REGISTER_OP("Tfgradcomp>SumLevels")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("base: int")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .Attr("step: int")
    .Attr("zero: int")
    .SetShapeFn(SumLevelsShape);

REGISTER_OP("Tfgradcomp>ApplySumLevels")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .TFGRADCOMP_UPDATES.Attr("base: int")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .Attr("step: int")
    .Attr("zero: int")
    .SetShapeFn(SumLevelsShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CODES_OPS_H_
