// The ops' kernels for levels.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LEVELS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LEVELS_KERNELS_H_

#include <cstdint>
#include <string>

#include "../kernels.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class FindLevelsOp : public KernelOp<Device, FindLevels> {
 public:
  explicit FindLevelsOp(OpKernelConstruction* context)
      : KernelOp<Device, FindLevels>(context) {
    std::string rule;
    OP_REQUIRES_OK(context, context->GetAttr("rule", &rule));
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES_OK(context, context->GetAttr("sweeps", &sweeps_));
    OP_REQUIRES_OK(context, CheckRule(rule, count_, sweeps_, &rule_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, FindLevels* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, parts, args));
    args->rule = rule_;
    args->count = count_;
    args->sweeps = sweeps_;
    if constexpr (!Device::kOnHost) {
      const int64_t scratch = tfgradcomp_format::LevelsScratch(args->size);
      TF_RETURN_IF_ERROR(context->allocate_temp(
          tensorflow::DT_INT64, TensorShape({scratch}), &memory->scratch));
      args->scratch = Data<uint64_t>(&memory->scratch);
    }
    TF_RETURN_IF_ERROR(
        Output(context, 0, TensorShape({args->num_blocks, count_}), &args->levels));
    return Output(context, 1, TensorShape({}), &args->nonfinite);
  }

  LevelRule rule_;
  int64_t count_, sweeps_;
};

template <typename Device>
class PackLevelsOp : public KernelOp<Device, PackLevels> {
 public:
  using KernelOp<Device, PackLevels>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, PackLevels* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, parts + 1, args));
    TF_RETURN_IF_ERROR(OptionalStream(context, parts + 2, &args->stream));
    const Tensor& levels = context->input(parts);
    TF_RETURN_IF_ERROR(CheckRank("levels", levels, 2));
    args->count = levels.dim_size(1);
    TF_RETURN_IF_ERROR(
        CheckShape("levels", levels, TensorShape({args->num_blocks, args->count})));
    const bool draws = args->stream != nullptr;
    TF_RETURN_IF_ERROR(CheckLevelCount(draws ? 2 : 3, args->count));
    args->levels = Data<float>(levels);
    return OutputWords(context, 0, args->size, draws ? args->count : args->count - 1,
                       &args->words);
  }
};

template <typename Device>
class MeanOfLevelsOp : public ValuesOp<Device, MeanOfLevels> {
 public:
  using ValuesOp<Device, MeanOfLevels>::ValuesOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanOfLevels* args,
                       Memory* memory) const override {
    args->size = this->count_;
    const Tensor& levels = context->input(1);
    TF_RETURN_IF_ERROR(CheckRank("levels", levels, 3));
    args->count = levels.dim_size(2);
    TF_RETURN_IF_ERROR(CheckLevelCount(2, args->count));
    TF_RETURN_IF_ERROR(WorkersWords(context, 0, "words", this->count_, args->count,
                                    &args->num_workers, &args->words));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, 2, args));
    TF_RETURN_IF_ERROR(
        CheckShape("levels", levels,
                   TensorShape({args->num_workers, args->num_blocks, args->count})));
    args->levels = Data<float>(levels);
    return this->Values(context, memory, args);
  }
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LEVELS_KERNELS_H_
