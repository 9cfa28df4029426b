// The ops' kernels for signs.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SIGNS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SIGNS_KERNELS_H_

#include "../kernels.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class PackSignsOp : public KernelOp<Device, PackSigns> {
 public:
  using KernelOp<Device, PackSigns>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, PackSigns* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(OptionalStream(context, parts, &args->stream));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, args->size, 2, &args->words));
    return Output(context, 1, TensorShape({}), &args->nonfinite);
  }
};

template <typename Device>
class PackMomentumSignsOp : public KernelOp<Device, PackMomentumSigns> {
 public:
  explicit PackMomentumSignsOp(OpKernelConstruction* context)
      : KernelOp<Device, PackMomentumSigns>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("beta", &beta_));
    OP_REQUIRES_OK(context, context->GetAttr("one_minus_beta", &one_minus_beta_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, PackMomentumSigns* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Vector(context, parts, "momentum", args->size, &args->momentum));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 1, "warming_up", &args->warming_up));
    TF_RETURN_IF_ERROR(OptionalStream(context, parts + 2, &args->stream));
    args->beta = beta_;
    args->one_minus_beta = one_minus_beta_;
    TF_RETURN_IF_ERROR(OutputWords(context, 0, args->size, 2, &args->words));
    TF_RETURN_IF_ERROR(
        OutputState<Device>(context, 1, args->size, &args->new_momentum));
    return Output(context, 2, TensorShape({}), &args->nonfinite);
  }

  float beta_, one_minus_beta_;
};

template <typename Device>
class MeanOfSignsOp : public ValuesOp<Device, MeanOfSigns> {
 public:
  using ValuesOp<Device, MeanOfSigns>::ValuesOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanOfSigns* args,
                       Memory* memory) const override {
    args->size = this->count_;
    TF_RETURN_IF_ERROR(WorkersWords(context, 0, "words", this->count_, 2,
                                    &args->num_workers, &args->words));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, 2, args));
    TF_RETURN_IF_ERROR(WorkersScale(context, 1, "scale", args->num_workers,
                                    args->num_blocks, &args->scale));
    return this->Values(context, memory, args);
  }
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SIGNS_KERNELS_H_
