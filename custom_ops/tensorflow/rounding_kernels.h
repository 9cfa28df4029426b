// The op's kernel for rounding at random.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ROUNDING_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ROUNDING_KERNELS_H_

#include "../kernels.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class RoundToBfloat16Op : public KernelOp<Device, RoundToBfloat16> {
 public:
  using KernelOp<Device, RoundToBfloat16>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, RoundToBfloat16* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(FirstVector(context, 0, "x", &args->size, &args->x));
    TF_RETURN_IF_ERROR(Stream(context, 1, &args->stream));
    return Output(context, 0, TensorShape({args->size}), &args->rounded);
  }
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ROUNDING_KERNELS_H_
