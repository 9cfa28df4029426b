// The ops for collectives over TCP: their arguments and static shapes. Only ops.cc
// includes this file.
//
// mesh: the number that tfgradcomp_start_mesh has returned. site: the call site, the
// same number in all processes. ordering_token: any resource; calls that share it keep
// their order in a function.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_OPS_H_

#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

REGISTER_OP("Tfgradcomp>TcpGather")
    .Input("vector: T")
    .Input("ordering_token: resource")
    .Output("rows: T")
    .Attr("T: numbertype")
    .Attr("num_workers: int >= 2")
    .Attr("mesh: int")
    .Attr("site: int")
    .Attr("call_site: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_workers;
      TF_RETURN_IF_ERROR(c->GetAttr("num_workers", &num_workers));
      ShapeHandle vector, rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      TF_RETURN_IF_ERROR(c->Concatenate(c->Vector(num_workers), vector, &rows));
      c->set_output(0, rows);
      return absl::OkStatus();
    });

REGISTER_OP("Tfgradcomp>TcpAllToAll")
    .Input("rows: T")
    .Input("ordering_token: resource")
    .Output("received: T")
    .Attr("T: numbertype")
    .Attr("num_workers: int >= 2")
    .Attr("mesh: int")
    .Attr("site: int")
    .Attr("call_site: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
      c->set_output(0, rows);
      return absl::OkStatus();
    });

REGISTER_OP("Tfgradcomp>TcpReduce")
    .Input("vector: T")
    .Input("ordering_token: resource")
    .Output("reduced: T")
    .Attr("T: {int32, float, half, bfloat16}")
    .Attr("merge: {'sum', 'max'}")
    .Attr("num_workers: int >= 2")
    .Attr("mesh: int")
    .Attr("site: int")
    .Attr("call_site: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle vector;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      c->set_output(0, vector);
      return absl::OkStatus();
    });

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_OPS_H_
