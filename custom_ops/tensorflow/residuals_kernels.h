// The ops' kernels for residuals.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_KERNELS_H_

#include "../kernels.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class AddScaledOp : public KernelOp<Device, AddScaled> {
 public:
  using KernelOp<Device, AddScaled>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, AddScaled* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Vector(context, parts, "y", args->size, &args->y));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 1, "factor", &args->factor));
    return Output(context, 0, TensorShape({args->size}), &args->total);
  }
};

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

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_KERNELS_H_
