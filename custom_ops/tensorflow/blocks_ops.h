// The ops for statistics of blocks: their arguments and static shapes. Only ops.cc
// includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_BLOCKS_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_BLOCKS_OPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

inline absl::Status BlockStatisticsShape(InferenceContext* c) {
  std::vector<std::string> names;
  int64_t unused;
  TF_RETURN_IF_ERROR(c->GetAttr("sums", &names));
  TF_RETURN_IF_ERROR(CheckSums(names, &unused));
  DimensionHandle size, num_blocks;
  int parts;
  TF_RETURN_IF_ERROR(JoinParts(c, &size, &parts));
  TF_RETURN_IF_ERROR(Blocks(c, parts, &num_blocks));
  c->set_output(0, c->Matrix(c->MakeDim(5), num_blocks));
  return absl::OkStatus();
}

REGISTER_OP("Tfgradcomp>BlockStatistics")
    .Input("x: num_parts * float")
    .Input("row_splits: int64")
    .Output("statistics: double")
    .Attr("num_parts: int >= 1")
    .Attr("x_scale: float = 1.0")
    .Attr("sums: list(string)")
    .SetShapeFn(BlockStatisticsShape);

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_BLOCKS_OPS_H_
