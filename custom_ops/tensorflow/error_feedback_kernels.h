// The ops' kernels for error feedback with scaled signs.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ERROR_FEEDBACK_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ERROR_FEEDBACK_KERNELS_H_

#include <cstdint>

#include "../kernels.h"
#include "../word_format.h"
#include "kernel_op.h"

namespace tfgradcomp {

// Reads the common inputs of the server's ops: 0 and 1 are the words and scales that
// the workers sent, 2 is the residual and 3 is the ratio.
template <typename Device, typename Args>
absl::Status ServerInputs(OpKernelContext* context, int row_splits, Args* args) {
  TF_RETURN_IF_ERROR(FirstVector(context, 2, "residual", &args->size, &args->residual));
  TF_RETURN_IF_ERROR(WorkersWords(context, 0, "sent_words", args->size, 2,
                                  &args->num_workers, &args->sent_words));
  TF_RETURN_IF_ERROR(Scalar(context, 3, "ratio", &args->ratio));
  TF_RETURN_IF_ERROR(Blocks<Device>(context, row_splits, args));
  return WorkersScale(context, 1, "sent_scale", args->num_workers, args->num_blocks,
                      &args->sent_scale);
}

template <typename Device>
class SignErrorFeedbackOp : public KernelOp<Device, SignErrorFeedback> {
 public:
  explicit SignErrorFeedbackOp(OpKernelConstruction* context)
      : KernelOp<Device, SignErrorFeedback>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("mu", &mu_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, SignErrorFeedback* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    const int64_t size = args->size;
    TF_RETURN_IF_ERROR(Vector(context, parts, "residual", size, &args->residual));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 1, "ratio", &args->ratio));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 2, "moving", &args->moving));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, parts + 3, args));
    TF_RETURN_IF_ERROR(
        OptionalVector(context, parts + 4, "momentum", size, &args->momentum));
    args->mu = mu_;
    const int64_t slots = tfgradcomp_format::SlotsFor(size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, slots, memory, &args->scratch));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, size, 2, &args->words));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({args->num_blocks}), &args->scale));
    TF_RETURN_IF_ERROR(OutputState<Device>(context, 2, size, &args->new_residual));
    if (args->momentum == nullptr) return absl::OkStatus();
    return OutputState<Device>(context, 3, size, &args->new_momentum);
  }

  float mu_;
};

template <typename Device>
class MeanSignErrorFeedbackOp : public KernelOp<Device, MeanSignErrorFeedback> {
 public:
  using KernelOp<Device, MeanSignErrorFeedback>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanSignErrorFeedback* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(ServerInputs<Device>(context, 5, args));
    TF_RETURN_IF_ERROR(Scalar(context, 4, "moving", &args->moving));
    const int64_t size = args->size;
    const int64_t slots = tfgradcomp_format::SlotsFor(size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, slots, memory, &args->scratch));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, size, 2, &args->words));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({args->num_blocks}), &args->scale));
    return OutputState<Device>(context, 2, size, &args->new_residual);
  }
};

template <typename Device>
class MeanSignSumsOp : public KernelOp<Device, MeanSignSums> {
 public:
  using KernelOp<Device, MeanSignSums>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanSignSums* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(ServerInputs<Device>(context, 4, args));
    const int64_t slots = tfgradcomp_format::SlotsFor(args->size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, slots, memory, &args->scratch));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, args->size, 2, &args->words));
    return Output(context, 1, TensorShape({args->num_blocks}), &args->l1);
  }
};

template <typename Device>
class MeanSignResidualOp : public KernelOp<Device, MeanSignResidual> {
 public:
  using KernelOp<Device, MeanSignResidual>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanSignResidual* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(ServerInputs<Device>(context, 7, args));
    TF_RETURN_IF_ERROR(Scalar(context, 4, "moving", &args->moving));
    const Tensor& words = context->input(5);
    const int64_t expected = tfgradcomp_format::WordsFor(args->size, 2);
    TF_RETURN_IF_ERROR(CheckShape("words", words, TensorShape({expected})));
    args->words = Data<uint32_t>(words);
    TF_RETURN_IF_ERROR(Vector(context, 6, "scale", args->num_blocks, &args->scale));
    return OutputState<Device>(context, 0, args->size, &args->new_residual);
  }
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ERROR_FEEDBACK_KERNELS_H_
