// The ops for the largest elements of chunks: their arguments and static shapes. Only
// ops.cc includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNKS_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNKS_OPS_H_

#include <cstdint>

#include "../chunks.h"
#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

// Reads how many words and levels `blocks` blocks have, and the levels of one.
inline absl::Status ChunkShapes(InferenceContext* c, DimensionHandle blocks,
                                DimensionHandle* words, DimensionHandle* levels) {
  int64_t k, chunk, bits;
  TF_RETURN_IF_ERROR(GetInt(c, "k", &k));
  TF_RETURN_IF_ERROR(GetInt(c, "chunk", &chunk));
  TF_RETURN_IF_ERROR(GetInt(c, "bits", &bits));
  TF_RETURN_IF_ERROR(CheckChunkFormat(k, chunk, bits));
  const tfgradcomp_format::ChunkFormat format(k, chunk, bits);
  *levels = c->MakeDim(format.levels);
  return c->Multiply(blocks, format.words, words);
}

inline absl::Status PackLargestShape(InferenceContext* c) {
  DimensionHandle size, num_blocks, words, levels;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(Blocks(c, parts, &num_blocks));
  TF_RETURN_IF_ERROR(ChunkShapes(c, num_blocks, &words, &levels));
  c->set_output(0, c->Vector(words));
  c->set_output(1, c->Matrix(num_blocks, levels));
  c->set_output(2, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>PackLargest")
    .Input("x: num_parts * float")
    .Input("row_splits: int64")
    .Output("words: int32")
    .Output("levels: float")
    .Output("nonfinite: int64")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("k: int")
    .Attr("chunk: int")
    .Attr("bits: int")
    .SetShapeFn(PackLargestShape);

inline absl::Status MeanOfLargestShape(InferenceContext* c) {
  int64_t count;
  DimensionHandle num_blocks, words, levels;
  ShapeHandle given;
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(Blocks(c, 2, &num_blocks));
  TF_RETURN_IF_ERROR(ChunkShapes(c, num_blocks, &words, &levels));
  TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->Matrix(c->UnknownDim(), words), &given));
  const ShapeHandle table = c->MakeShape({c->Dim(given, 0), num_blocks, levels});
  TF_RETURN_IF_ERROR(c->Merge(c->input(1), table, &given));
  return SetParts(c, count);
}

REGISTER_OP("Tfgradcomp>MeanOfLargest")
    .Input("words: int32")
    .Input("levels: float")
    .Input("row_splits: int64")
    .Output("values: num_values * float")
    .Attr("num_values: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("count: int")
    .Attr("k: int")
    .Attr("chunk: int")
    .Attr("bits: int")
    .SetShapeFn(MeanOfLargestShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNKS_OPS_H_
