// The ops' kernels for statistics of blocks.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_BLOCKS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_BLOCKS_KERNELS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "../kernels.h"
#include "../word_format.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

template <typename Device>
class BlockStatisticsOp : public KernelOp<Device, BlockStatistics> {
 public:
  explicit BlockStatisticsOp(OpKernelConstruction* context)
      : KernelOp<Device, BlockStatistics>(context) {
    std::vector<std::string> names;
    OP_REQUIRES_OK(context, context->GetAttr("sums", &names));
    OP_REQUIRES_OK(context, CheckSums(names, &sums_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, BlockStatistics* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, parts, args));
    const int64_t slots = tfgradcomp_format::SlotsFor(args->size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, 5 * slots, memory, &args->scratch));
    args->sums = sums_;
    return Output(context, 0, TensorShape({5, args->num_blocks}), &args->statistics);
  }

  int64_t sums_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_BLOCKS_KERNELS_H_
