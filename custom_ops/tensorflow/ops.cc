// The ops as TensorFlow sees them: names, arguments and static shapes. What they
// compute is said in ../kernels.h; op_kernels.h checks values.
//
// An optional argument is a list of length 0 or 1. The vector x is the list of its
// parts, in order and of any shapes; values are written to parts of the given sizes.

#include <cstdint>
#include <string>
#include <vector>

#include "../word_format.h"
#include "arguments.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfgradcomp {
namespace {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

absl::Status GetInt(InferenceContext* c, const char* name, int64_t* value) {
  return c->GetAttr(name, value);
}

absl::Status GetCount(InferenceContext* c, int64_t* count) {
  TF_RETURN_IF_ERROR(GetInt(c, "count", count));
  return CheckCount(*count);
}

absl::Status GetBase(InferenceContext* c, int64_t* base) {
  TF_RETURN_IF_ERROR(GetInt(c, "base", base));
  return CheckBase(*base);
}

// The dimension of the words that `count` codes take.
DimensionHandle Words(InferenceContext* c, DimensionHandle count, int64_t base) {
  if (!c->ValueKnown(count)) return c->UnknownDim();
  return c->MakeDim(tfgradcomp_format::WordsFor(c->Value(count), base));
}

// The one dimension of input `index`, which must agree with `*size` so far.
absl::Status MergeVector(InferenceContext* c, int index, DimensionHandle* size) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 1, &shape));
  return c->Merge(*size, c->Dim(shape, 0), size);
}

// The elements of the inputs [begin, end) in all.
absl::Status AddElements(InferenceContext* c, int begin, int end,
                         DimensionHandle* size) {
  *size = c->MakeDim(0);
  for (int i = begin; i < end; ++i) {
    TF_RETURN_IF_ERROR(c->Add(*size, c->NumElements(c->input(i)), size));
  }
  return absl::OkStatus();
}

// The parts of a vector, the first inputs: their elements in all, and how many they
// are.
absl::Status JoinParts(InferenceContext* c, DimensionHandle* size, int* num_parts) {
  TF_RETURN_IF_ERROR(c->GetAttr("num_parts", num_parts));
  return AddElements(c, 0, *num_parts, size);
}

// The vector of `count` elements in parts, the only outputs.
absl::Status SetParts(InferenceContext* c, int64_t count) {
  std::vector<int64_t> sizes;
  TF_RETURN_IF_ERROR(c->GetAttr("sizes", &sizes));
  TF_RETURN_IF_ERROR(CheckSizes(sizes, c->num_outputs(), count));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(sizes[i]));
  return absl::OkStatus();
}

absl::Status CheckScalar(InferenceContext* c, int index) {
  ShapeHandle shape;
  return c->WithRank(c->input(index), 0, &shape);
}

// Blocks of `row_splits`.
absl::Status Blocks(InferenceContext* c, int index, DimensionHandle* num_blocks) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 1, &shape));
  return c->Subtract(c->Dim(shape, 0), 1, num_blocks);
}

absl::Status CheckStream(InferenceContext* c, int index) {
  DimensionHandle three = c->MakeDim(3);
  return MergeVector(c, index, &three);
}

// An optional stream from input `index` on.
absl::Status CheckStreams(InferenceContext* c, int index) {
  return index < c->num_inputs() ? CheckStream(c, index) : absl::OkStatus();
}

// The words of N workers, [N, WordsFor(count, base)].
absl::Status WorkersWords(InferenceContext* c, int index, int64_t count, int64_t base,
                          DimensionHandle* num_workers) {
  ShapeHandle shape;
  DimensionHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 2, &shape));
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(shape, 1),
                                  tfgradcomp_format::WordsFor(count, base), &unused));
  *num_workers = c->Dim(shape, 0);
  return absl::OkStatus();
}

absl::Status WorkersScale(InferenceContext* c, int index, DimensionHandle num_workers,
                          DimensionHandle num_blocks) {
  ShapeHandle shape;
  return c->Merge(c->input(index), c->Matrix(num_workers, num_blocks), &shape);
}

absl::Status PackCodesShape(InferenceContext* c) {
  int64_t base;
  DimensionHandle size = c->UnknownDim();
  TF_RETURN_IF_ERROR(GetBase(c, &base));
  TF_RETURN_IF_ERROR(MergeVector(c, 0, &size));
  c->set_output(0, c->Vector(Words(c, size, base)));
  return absl::OkStatus();
}

absl::Status UnpackCodesShape(InferenceContext* c) {
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

absl::Status PackSignsShape(InferenceContext* c) {
  DimensionHandle size;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(CheckStreams(c, parts));
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status PackMomentumSignsShape(InferenceContext* c) {
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

absl::Status PackTernaryShape(InferenceContext* c) {
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

absl::Status BlockStatisticsShape(InferenceContext* c) {
  DimensionHandle size, num_blocks;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(Blocks(c, parts, &num_blocks));
  c->set_output(0, c->Matrix(c->MakeDim(5), num_blocks));
  return absl::OkStatus();
}

absl::Status SumCodesShape(InferenceContext* c) {
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

absl::Status SumLevelsShape(InferenceContext* c) {
  int64_t base, count;
  DimensionHandle num_workers, num_blocks;
  TF_RETURN_IF_ERROR(GetBase(c, &base));
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, base, &num_workers));
  TF_RETURN_IF_ERROR(Blocks(c, 2, &num_blocks));
  TF_RETURN_IF_ERROR(MergeVector(c, 1, &num_blocks));
  return SetParts(c, count);
}

absl::Status MeanOfSignsShape(InferenceContext* c) {
  int64_t count;
  DimensionHandle num_workers, num_blocks;
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, 2, &num_workers));
  TF_RETURN_IF_ERROR(Blocks(c, 2, &num_blocks));
  TF_RETURN_IF_ERROR(WorkersScale(c, 1, num_workers, num_blocks));
  return SetParts(c, count);
}

absl::Status FindLevelsShape(InferenceContext* c) {
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

absl::Status PackLevelsShape(InferenceContext* c) {
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

absl::Status MeanOfLevelsShape(InferenceContext* c) {
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

absl::Status MajorityVoteShape(InferenceContext* c) {
  int64_t base, reply_base, count;
  DimensionHandle num_workers;
  TF_RETURN_IF_ERROR(GetInt(c, "base", &base));
  TF_RETURN_IF_ERROR(GetInt(c, "reply_base", &reply_base));
  TF_RETURN_IF_ERROR(CheckVoteBases(base, reply_base));
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, base, &num_workers));
  TF_RETURN_IF_ERROR(CheckStreams(c, 1));
  c->set_output(0, c->Vector(tfgradcomp_format::WordsFor(count, reply_base)));
  return absl::OkStatus();
}

absl::Status SignErrorFeedbackShape(InferenceContext* c) {
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

// What the server's ops read alike: what was sent, the residual and the ratio.
absl::Status ServerInputs(InferenceContext* c, int row_splits, DimensionHandle* size,
                          DimensionHandle* num_blocks) {
  ShapeHandle sent;
  TF_RETURN_IF_ERROR(MergeVector(c, 2, size));
  TF_RETURN_IF_ERROR(
      c->Merge(c->input(0), c->Matrix(c->UnknownDim(), Words(c, *size, 2)), &sent));
  TF_RETURN_IF_ERROR(CheckScalar(c, 3));
  TF_RETURN_IF_ERROR(Blocks(c, row_splits, num_blocks));
  return WorkersScale(c, 1, c->Dim(sent, 0), *num_blocks);
}

absl::Status MeanSignErrorFeedbackShape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim(), num_blocks;
  TF_RETURN_IF_ERROR(ServerInputs(c, 5, &size, &num_blocks));
  TF_RETURN_IF_ERROR(CheckScalar(c, 4));
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Vector(num_blocks));
  c->set_output(2, c->Vector(size));
  return absl::OkStatus();
}

absl::Status MeanSignSumsShape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim(), num_blocks;
  TF_RETURN_IF_ERROR(ServerInputs(c, 4, &size, &num_blocks));
  c->set_output(0, c->Vector(Words(c, size, 2)));
  c->set_output(1, c->Vector(num_blocks));
  return absl::OkStatus();
}

absl::Status MeanSignResidualShape(InferenceContext* c) {
  DimensionHandle size = c->UnknownDim(), num_blocks;
  TF_RETURN_IF_ERROR(ServerInputs(c, 7, &size, &num_blocks));
  TF_RETURN_IF_ERROR(CheckScalar(c, 4));
  DimensionHandle words = Words(c, size, 2);
  TF_RETURN_IF_ERROR(MergeVector(c, 5, &words));
  TF_RETURN_IF_ERROR(MergeVector(c, 6, &num_blocks));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

// What the ops read alike that pack sparse words: x, moments and the residual. `next`
// is the input after them.
absl::Status Gathered(InferenceContext* c, DimensionHandle* size, int* next) {
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

absl::Status PackUnambiguousShape(InferenceContext* c) {
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

absl::Status PackOverThresholdShape(InferenceContext* c) {
  DimensionHandle size;
  float threshold;
  int next;
  TF_RETURN_IF_ERROR(c->GetAttr("threshold", &threshold));
  TF_RETURN_IF_ERROR(CheckThreshold(threshold));
  TF_RETURN_IF_ERROR(Gathered(c, &size, &next));
  if (c->num_inputs() > next) TF_RETURN_IF_ERROR(MergeVector(c, next, &size));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector(size));
  c->set_output(2, c->Scalar());
  for (int i = 3; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(size));
  return absl::OkStatus();
}

absl::Status MeanOfSparseShape(InferenceContext* c) {
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

REGISTER_OP("Tfgradcomp>PackCodes")
    .Input("codes: int32")
    .Output("words: int32")
    .Attr("base: int")
    .SetShapeFn(PackCodesShape);

REGISTER_OP("Tfgradcomp>UnpackCodes")
    .Input("words: int32")
    .Output("codes: int32")
    .Attr("base: int")
    .Attr("count: int")
    .SetShapeFn(UnpackCodesShape);

REGISTER_OP("Tfgradcomp>PackSigns")
    .Input("x: num_parts * float")
    .Input("stream: num_streams * int64")
    .Output("words: int32")
    .Output("nonfinite: int64")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_streams: int >= 0")
    .SetShapeFn(PackSignsShape);

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

REGISTER_OP("Tfgradcomp>BlockStatistics")
    .Input("x: num_parts * float")
    .Input("row_splits: int64")
    .Output("statistics: double")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .SetShapeFn(BlockStatisticsShape);

REGISTER_OP("Tfgradcomp>SumCodes")
    .Input("words: int32")
    .Output("sum: int32")
    .Attr("base: int")
    .Attr("count: int")
    .Attr("sum_base: list(int)")
    .SetShapeFn(SumCodesShape);

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

REGISTER_OP("Tfgradcomp>MeanOfSigns")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfSignsShape);

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

REGISTER_OP("Tfgradcomp>MeanOfLevels")
    .Input("words: int32")
    .Input("levels: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfLevelsShape);

REGISTER_OP("Tfgradcomp>MajorityVote")
    .Input("words: int32")
    .Input("stream: num_streams * int64")
    .Output("votes: int32")
    .Attr("num_streams: int >= 0")
    .Attr("count: int")
    .Attr("base: int")
    .Attr("reply_base: int")
    .Attr("quorum: int")
    .SetShapeFn(MajorityVoteShape);

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

REGISTER_OP("Tfgradcomp>MeanSignSums")
    .Input("sent_words: int32")
    .Input("sent_scale: float")
    .Input("residual: float")
    .Input("ratio: float")
    .Input("row_splits: int64")
    .Output("words: int32")
    .Output("l1: double")
    .SetShapeFn(MeanSignSumsShape);

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

REGISTER_OP("Tfgradcomp>PackOverThreshold")
    .Input("x: num_parts * float")
    .Input("moments: num_moments * float")
    .Input("residual: float")
    .Input("variance: num_variances * float")
    .Output("words: int32")
    .Output("new_residual: float")
    .Output("nonfinite: int64")
    .Output("new_variance: num_variances * float")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("num_moments: int >= 0")
    .Attr("moments_scale: float = 1.0")
    .Attr("num_variances: int >= 0")
    .Attr("threshold: float")
    .Attr("alpha: float")
    .Attr("decay: float")
    .SetShapeFn(PackOverThresholdShape);

REGISTER_OP("Tfgradcomp>MeanOfSparse")
    .Input("words: int32")
    .Input("scale: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .SetShapeFn(MeanOfSparseShape);

}  // namespace
}  // namespace tfgradcomp

// How this library was built, for `python -m tfgradcomp.ops --info`.
extern "C" __attribute__((visibility("default"))) const char* tfgradcomp_built_with() {
  return TFGRADCOMP_BUILT_WITH;
}
