// The ops' kernels for codes and their words.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CODES_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CODES_KERNELS_H_

#include <cstdint>
#include <vector>

#include "../kernels.h"
#include "../word_format.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class PackCodesOp : public KernelOp<Device, PackCodes> {
 public:
  explicit PackCodesOp(OpKernelConstruction* context)
      : KernelOp<Device, PackCodes>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("base", &base_));
    OP_REQUIRES_OK(context, CheckBase(base_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, PackCodes* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(FirstVector(context, 0, "codes", &args->size, &args->codes));
    args->base = base_;
    return OutputWords(context, 0, args->size, base_, &args->words);
  }

  int64_t base_;
};

template <typename Device>
class UnpackCodesOp : public KernelOp<Device, UnpackCodes> {
 public:
  explicit UnpackCodesOp(OpKernelConstruction* context)
      : KernelOp<Device, UnpackCodes>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("base", &base_));
    OP_REQUIRES_OK(context, CheckBase(base_));
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES_OK(context, CheckCount(count_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, UnpackCodes* args,
                       Memory* memory) const override {
    const Tensor& words = context->input(0);
    const int64_t expected = tfgradcomp_format::WordsFor(count_, base_);
    if (words.dims() == 0 || words.dim_size(words.dims() - 1) != expected) {
      return Invalid("words must have a last axis of ", expected, " for ", count_,
                     " codes of base ", base_, ". Received: words of shape ",
                     words.shape().DebugString());
    }
    TensorShape shape = words.shape();
    shape.set_dim(words.dims() - 1, count_);
    args->words = Data<uint32_t>(words);
    // Without rows there is nothing to compute, whatever `count` is.
    args->size = shape.num_elements() > 0 ? count_ : 0;
    args->rows = args->size > 0 ? shape.num_elements() / count_ : 0;
    args->base = base_;
    return Output(context, 0, shape, &args->codes);
  }

  int64_t base_, count_;
};

template <typename Device>
class PackTernaryOp : public KernelOp<Device, PackTernary> {
 public:
  using KernelOp<Device, PackTernary>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, PackTernary* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, parts + 2, args));
    TF_RETURN_IF_ERROR(Vector(context, parts, "limit", args->num_blocks, &args->limit));
    TF_RETURN_IF_ERROR(
        Vector(context, parts + 1, "scale", args->num_blocks, &args->scale));
    TF_RETURN_IF_ERROR(Stream(context, parts + 3, &args->stream));
    return OutputWords(context, 0, args->size, 3, &args->words);
  }
};

template <typename Device>
class SumCodesOp : public KernelOp<Device, SumCodes> {
 public:
  explicit SumCodesOp(OpKernelConstruction* context)
      : KernelOp<Device, SumCodes>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("base", &base_));
    OP_REQUIRES_OK(context, CheckBase(base_));
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES_OK(context, CheckCount(count_));
    OP_REQUIRES_OK(context, context->GetAttr("sum_base", &sum_base_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, SumCodes* args,
                       Memory* memory) const override {
    int64_t sum_base = 0;
    args->size = count_;
    args->base = base_;
    TF_RETURN_IF_ERROR(WorkersWords(context, 0, "words", count_, base_,
                                    &args->num_workers, &args->words));
    TF_RETURN_IF_ERROR(BaseOfSum(args->num_workers, base_, sum_base_, &sum_base));
    args->sum_base = sum_base;
    return OutputWords(context, 0, count_, sum_base, &args->sum);
  }

  int64_t base_, count_;
  std::vector<int64_t> sum_base_;  // At most one.
};

template <typename Device>
class SumLevelsOp : public ValuesOp<Device, SumLevels> {
 public:
  explicit SumLevelsOp(OpKernelConstruction* context)
      : ValuesOp<Device, SumLevels>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("base", &base_));
    OP_REQUIRES_OK(context, CheckBase(base_));
    OP_REQUIRES_OK(context, context->GetAttr("step", &step_));
    OP_REQUIRES_OK(context, context->GetAttr("zero", &zero_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, SumLevels* args,
                       Memory* memory) const override {
    args->size = this->count_;
    args->base = base_;
    args->step = step_;
    args->zero = zero_;
    TF_RETURN_IF_ERROR(WorkersWords(context, 0, "words", this->count_, base_,
                                    &args->num_workers, &args->words));
    TF_RETURN_IF_ERROR(CheckLevels(args->num_workers, base_, step_, zero_));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, 2, args));
    TF_RETURN_IF_ERROR(Vector(context, 1, "scale", args->num_blocks, &args->scale));
    return this->Values(context, memory, args);
  }

  int64_t base_, step_, zero_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CODES_KERNELS_H_
