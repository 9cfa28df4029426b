// The ops for votes: their arguments and static shapes. Only ops.cc includes this file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_VOTES_OPS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_VOTES_OPS_H_

#include <cstdint>

#include "../word_format.h"
#include "arguments.h"
#include "shapes.h"
#include "tensorflow/core/framework/op.h"

namespace tfgradcomp {

inline absl::Status MajorityVoteShape(InferenceContext* c) {
  int64_t base, reply_base, quorum, count;
  DimensionHandle num_workers;
  TF_RETURN_IF_ERROR(GetInt(c, "base", &base));
  TF_RETURN_IF_ERROR(GetInt(c, "reply_base", &reply_base));
  TF_RETURN_IF_ERROR(GetInt(c, "quorum", &quorum));
  TF_RETURN_IF_ERROR(CheckVoteBases(base, reply_base));
  TF_RETURN_IF_ERROR(CheckQuorum(quorum));
  TF_RETURN_IF_ERROR(GetCount(c, &count));
  TF_RETURN_IF_ERROR(WorkersWords(c, 0, count, base, &num_workers));
  TF_RETURN_IF_ERROR(CheckStreams(c, 1));
  c->set_output(0, c->Vector(tfgradcomp_format::WordsFor(count, reply_base)));
  return absl::OkStatus();
}

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

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_VOTES_OPS_H_
