// The ops' kernels for updates by a vector, the search for NaN, and residuals.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_RESIDUALS_KERNELS_H_

#include <cstdint>
#include <vector>

#include "../kernels.h"
#include "kernel_op.h"
#include "updates.h"

namespace tfgradcomp {

template <typename Device>
class ApplyVectorOp : public KernelOp<Device, ApplyVector> {
 public:
  explicit ApplyVectorOp(OpKernelConstruction* context)
      : KernelOp<Device, ApplyVector>(context) {
    OP_REQUIRES_OK(context, updater_.Read(context));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, ApplyVector* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    std::vector<int64_t> sizes;
    for (int i = 0; i < parts; ++i) sizes.push_back(context->input(i).NumElements());
    args->update = &memory->update.update;
    return updater_.Open(context, sizes, &memory->update);
  }

  Updater updater_;
};

template <typename Device>
class FirstNonfiniteOp : public KernelOp<Device, FirstNonfinite> {
 public:
  using KernelOp<Device, FirstNonfinite>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, FirstNonfinite* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Scalar(context, parts, "is_finite", &args->is_finite));
    return Output(context, 0, TensorShape({}), &args->part);
  }
};

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
    return OutputState<Device>(context, 0, args->size, &args->total);
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
