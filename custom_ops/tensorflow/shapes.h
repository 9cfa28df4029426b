// Helpers of the ops' shape functions.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SHAPES_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SHAPES_H_

#include <cstdint>
#include <vector>

#include "../word_format.h"
#include "arguments.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfgradcomp {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

inline absl::Status GetInt(InferenceContext* c, const char* name, int64_t* value) {
  return c->GetAttr(name, value);
}

inline absl::Status GetCount(InferenceContext* c, int64_t* count) {
  TF_RETURN_IF_ERROR(GetInt(c, "count", count));
  return CheckCount(*count);
}

inline absl::Status GetBase(InferenceContext* c, int64_t* base) {
  TF_RETURN_IF_ERROR(GetInt(c, "base", base));
  return CheckBase(*base);
}

// Returns the dimension of the words that `count` codes take.
inline DimensionHandle Words(InferenceContext* c, DimensionHandle count, int64_t base) {
  if (!c->ValueKnown(count)) return c->UnknownDim();
  return c->MakeDim(tfgradcomp_format::WordsFor(c->Value(count), base));
}

// Merges `*size` with the only dimension of input `index`, which must be a vector.
inline absl::Status MergeVector(InferenceContext* c, int index, DimensionHandle* size) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 1, &shape));
  return c->Merge(*size, c->Dim(shape, 0), size);
}

// Adds up the numbers of elements of the inputs [begin, end).
inline absl::Status AddElements(InferenceContext* c, int begin, int end,
                                DimensionHandle* size) {
  *size = c->MakeDim(0);
  for (int i = begin; i < end; ++i) {
    TF_RETURN_IF_ERROR(c->Add(*size, c->NumElements(c->input(i)), size));
  }
  return absl::OkStatus();
}

// Reads the number of parts of the vector x, which are the first inputs, and the number
// of their elements.
inline absl::Status JoinParts(InferenceContext* c, DimensionHandle* size,
                              int* num_parts) {
  TF_RETURN_IF_ERROR(c->GetAttr("num_parts", num_parts));
  return AddElements(c, 0, *num_parts, size);
}

// Sets the shapes of the outputs, which are the parts of a vector of `count` elements.
// An op that updates variables has no outputs.
inline absl::Status SetParts(InferenceContext* c, int64_t count) {
  if (c->num_outputs() == 0) return absl::OkStatus();
  std::vector<int64_t> sizes;
  TF_RETURN_IF_ERROR(c->GetAttr("sizes", &sizes));
  TF_RETURN_IF_ERROR(CheckSizes(sizes, c->num_outputs(), count));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(sizes[i]));
  return absl::OkStatus();
}

inline absl::Status CheckScalar(InferenceContext* c, int index) {
  ShapeHandle shape;
  return c->WithRank(c->input(index), 0, &shape);
}

// Reads the number of blocks from input `index`, the row_splits.
inline absl::Status Blocks(InferenceContext* c, int index,
                           DimensionHandle* num_blocks) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 1, &shape));
  return c->Subtract(c->Dim(shape, 0), 1, num_blocks);
}

inline absl::Status CheckStream(InferenceContext* c, int index) {
  DimensionHandle three = c->MakeDim(3);
  return MergeVector(c, index, &three);
}

// Checks the optional stream, which is input `index` if there is one.
inline absl::Status CheckStreams(InferenceContext* c, int index) {
  return index < c->num_inputs() ? CheckStream(c, index) : absl::OkStatus();
}

// Checks the words of N workers, [N, WordsFor(count, base)], and reads N.
inline absl::Status WorkersWords(InferenceContext* c, int index, int64_t count,
                                 int64_t base, DimensionHandle* num_workers) {
  ShapeHandle shape;
  DimensionHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 2, &shape));
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(shape, 1),
                                  tfgradcomp_format::WordsFor(count, base), &unused));
  *num_workers = c->Dim(shape, 0);
  return absl::OkStatus();
}

inline absl::Status WorkersScale(InferenceContext* c, int index,
                                 DimensionHandle num_workers,
                                 DimensionHandle num_blocks) {
  ShapeHandle shape;
  return c->Merge(c->input(index), c->Matrix(num_workers, num_blocks), &shape);
}

// The inputs and attributes of an op that updates variables by its values: see
// updates.h.
#define TFGRADCOMP_UPDATES          \
  Input("coefficients: float")      \
      .Input("w: num_w * resource") \
      .Input("m: num_m * resource") \
      .Input("v: num_v * resource") \
      .Input("decays: float")       \
      .Attr("rule: string")         \
      .Attr("offsets: list(int)")   \
      .Attr("num_w: int >= 1")      \
      .Attr("num_m: int >= 0")      \
      .Attr("num_v: int >= 0")      \
      .SetIsStateful()

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SHAPES_H_
