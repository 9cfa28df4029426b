// The ops' kernels for votes.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_VOTES_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_VOTES_KERNELS_H_

#include <cstdint>

#include "../kernels.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class MajorityVoteOp : public KernelOp<Device, MajorityVote> {
 public:
  explicit MajorityVoteOp(OpKernelConstruction* context)
      : KernelOp<Device, MajorityVote>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES_OK(context, CheckCount(count_));
    OP_REQUIRES_OK(context, context->GetAttr("base", &base_));
    OP_REQUIRES_OK(context, context->GetAttr("reply_base", &reply_base_));
    OP_REQUIRES_OK(context, CheckVoteBases(base_, reply_base_));
    OP_REQUIRES_OK(context, context->GetAttr("quorum", &quorum_));
    OP_REQUIRES_OK(context, CheckQuorum(quorum_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, MajorityVote* args,
                       Memory* memory) const override {
    args->size = count_;
    args->base = base_;
    args->reply_base = reply_base_;
    args->quorum = quorum_;
    TF_RETURN_IF_ERROR(WorkersWords(context, 0, "words", count_, base_,
                                    &args->num_workers, &args->words));
    TF_RETURN_IF_ERROR(OptionalStream(context, 1, &args->stream));
    return OutputWords(context, 0, count_, reply_base_, &args->votes);
  }

  int64_t count_, base_, reply_base_, quorum_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_VOTES_KERNELS_H_
