// The ops' kernels for single elements of a vector.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_PAIRS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_PAIRS_KERNELS_H_

#include <cstdint>

#include "../kernels.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class FindLargestOp : public KernelOp<Device, FindLargest> {
 public:
  using KernelOp<Device, FindLargest>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, FindLargest* args,
                       Memory* memory) const override {
    int parts;
    const int32_t* count;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Scalar(context, parts, "count", &count));
    if (args->size > INT32_MAX) {
      return Invalid("x must have less than 2**31 elements. Received: ", args->size,
                     " elements");
    }
    if (*count < 0 || *count > args->size) {
      return Invalid("count must be in [0, ", args->size,
                     "], the number of elements. Received: count=", *count);
    }
    args->count = *count;
    return Output(context, 0, TensorShape({args->count}), &args->indices);
  }
};

// Reads indices of a vector's elements, where those below 0 stand for nothing.
inline absl::Status Indices(const Tensor& tensor, int64_t size, const int32_t** data) {
  *data = Data<int32_t>(tensor);
  for (int64_t i = 0; i < tensor.NumElements(); ++i) {
    if ((*data)[i] >= size) {
      return Invalid("indices must be below ", size,
                     ", the number of elements. Received: indices[", i,
                     "]=", (*data)[i]);
    }
  }
  return absl::OkStatus();
}

template <typename Device>
class ClearElementsOp : public KernelOp<Device, ClearElements> {
 public:
  using KernelOp<Device, ClearElements>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, ClearElements* args,
                       Memory*) const override {
    const Tensor& indices = context->input(1);
    TF_RETURN_IF_ERROR(FirstVector(context, 0, "x", &args->size, &args->x));
    TF_RETURN_IF_ERROR(CheckRank("indices", indices, 1));
    TF_RETURN_IF_ERROR(Indices(indices, args->size, &args->indices));
    args->count = indices.NumElements();
    return OutputState<Device>(context, 0, args->size, &args->cleared, 0);
  }
};

template <typename Device>
class MeanOfPairsOp : public KernelOp<Device, MeanOfPairs> {
 public:
  explicit MeanOfPairsOp(OpKernelConstruction* context)
      : KernelOp<Device, MeanOfPairs>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("count", &size_));
    OP_REQUIRES_OK(context, CheckCount(size_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, MeanOfPairs* args,
                       Memory*) const override {
    const Tensor &indices = context->input(0), &values = context->input(1);
    TF_RETURN_IF_ERROR(CheckRank("indices", indices, 2));
    TF_RETURN_IF_ERROR(CheckWorkers("indices", indices));
    TF_RETURN_IF_ERROR(CheckShape("values", values, indices.shape()));
    TF_RETURN_IF_ERROR(Indices(indices, size_, &args->indices));
    args->values = Data<float>(values);
    args->num_workers = indices.dim_size(0);
    args->num_pairs = indices.dim_size(1);
    args->size = size_;
    return OutputState<Device>(context, 0, size_, &args->mean);
  }

  int64_t size_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_PAIRS_KERNELS_H_
