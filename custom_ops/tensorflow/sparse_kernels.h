// The ops' kernels for sparse words.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SPARSE_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SPARSE_KERNELS_H_

#include <algorithm>
#include <cstdint>

#include "../kernels.h"
#include "../word_format.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

// The base class of kernels that pack sparse words, whose number is not known before.
// The words are the first output.
template <typename Device, typename Args>
class SparseOp : public KernelOp<Device, Args> {
 public:
  explicit SparseOp(OpKernelConstruction* context) : KernelOp<Device, Args>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(context, context->GetAttr("decay", &decay_));
    OP_REQUIRES_OK(context, CheckVariance(alpha_, decay_));
  }

 protected:
  // Reads the first inputs: x, moments and the residual. `*next` becomes the input
  // after them.
  absl::Status Gathered(OpKernelContext* context, Args* args, Memory* memory,
                        int* next) const {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(CheckSparseSize(args->size));
    TF_RETURN_IF_ERROR(InputVector<Device>(context, "moments", "moments_scale",
                                           &memory->moments, &args->moments));
    const int moments = static_cast<int>(memory->moments.parts.size());
    const int64_t found = memory->moments.splits.back();
    if (moments > 0 && found != args->size) {
      return Invalid("moments must have as many elements as x, ", args->size,
                     ". Received: moments of ", found, " elements");
    }
    args->alpha = alpha_;
    args->decay = decay_;
    *next = parts + moments + 1;
    return Vector(context, *next - 1, "residual", args->size, &args->residual);
  }

  // Allocates room for the largest number of words, and the kernel's other memory.
  absl::Status Room(OpKernelContext* context, int64_t num_blocks, Args* args,
                    Memory* memory) const {
    const auto allocate = [context](tensorflow::DataType type, int64_t size,
                                    Tensor* tensor) {
      return context->allocate_temp(type, TensorShape({size}), tensor);
    };
    const int64_t scratch = tfgradcomp_format::SparseScratch(args->size, num_blocks);
    TF_RETURN_IF_ERROR(allocate(tensorflow::DT_INT32, scratch, &memory->scratch));
    TF_RETURN_IF_ERROR(allocate(tensorflow::DT_INT32, args->size, &memory->words));
    TF_RETURN_IF_ERROR(allocate(tensorflow::DT_INT64, 1, &memory->count));
    args->scratch = Data<uint32_t>(&memory->scratch);
    args->words = Data<uint32_t>(&memory->words);
    args->count = Data<int64_t>(&memory->count);
    return absl::OkStatus();
  }

 private:
  absl::Status Finish(OpKernelContext* context, const Args& args,
                      const Memory& memory) const override {
    int64_t count = 0;
    TF_RETURN_IF_ERROR(Device::Read(context, args.count, &count));
    context->set_output(0, memory.words.Slice(0, count));
    return absl::OkStatus();
  }

  float alpha_, decay_;
};

template <typename Device>
class PackUnambiguousOp : public SparseOp<Device, PackUnambiguous> {
 public:
  using SparseOp<Device, PackUnambiguous>::SparseOp;

 private:
  absl::Status Prepare(OpKernelContext* context, PackUnambiguous* args,
                       Memory* memory) const override {
    int next;
    TF_RETURN_IF_ERROR(this->Gathered(context, args, memory, &next));
    const int64_t size = args->size;
    TF_RETURN_IF_ERROR(Vector(context, next, "variance", size, &args->variance));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, next + 1, args));
    TF_RETURN_IF_ERROR(this->Room(context, args->num_blocks, args, memory));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({args->num_blocks}), &args->exponents));
    TF_RETURN_IF_ERROR(OutputState<Device>(context, 2, size, &args->new_residual));
    TF_RETURN_IF_ERROR(OutputState<Device>(context, 3, size, &args->new_variance));
    return Output(context, 4, TensorShape({}), &args->nonfinite);
  }
};

template <typename Device>
class PackOverThresholdOp : public SparseOp<Device, PackOverThreshold> {
 public:
  using SparseOp<Device, PackOverThreshold>::SparseOp;

 private:
  absl::Status Prepare(OpKernelContext* context, PackOverThreshold* args,
                       Memory* memory) const override {
    int next;
    TF_RETURN_IF_ERROR(this->Gathered(context, args, memory, &next));
    const int64_t size = args->size;
    const int blocks = context->num_inputs() - 1;
    const bool has_variance = blocks - 1 > next;
    if (has_variance) {
      TF_RETURN_IF_ERROR(Vector(context, next, "variance", size, &args->variance));
    }
    if (has_variance != (args->moments.num_parts > 0)) {
      return Invalid(
          "moments and variance must be given both or neither. Received: moments of ",
          args->moments.num_parts, " tensors, variance of ", blocks - 1 - next);
    }
    TF_RETURN_IF_ERROR(Blocks<Device>(context, blocks, args));
    TF_RETURN_IF_ERROR(
        Vector(context, blocks - 1, "threshold", args->num_blocks, &args->threshold));
    if constexpr (Device::kOnHost) {
      for (int64_t b = 0; b < args->num_blocks; ++b) {
        TF_RETURN_IF_ERROR(CheckThreshold(args->threshold[b]));
      }
    }
    TF_RETURN_IF_ERROR(this->Room(context, 0, args, memory));
    TF_RETURN_IF_ERROR(OutputState<Device>(context, 1, size, &args->new_residual));
    TF_RETURN_IF_ERROR(Output(context, 2, TensorShape({}), &args->nonfinite));
    if (!has_variance) return absl::OkStatus();
    return OutputState<Device>(context, 3, size, &args->new_variance);
  }
};

// Checks the order of words that another process has sent: those of a worker have
// increasing indices, and words that stand for nothing come last.
inline absl::Status CheckOrder(const MeanOfSparse& args) {
  const auto index = [&](int64_t at) {
    return std::min(tfgradcomp_format::IndexOf(args.words[at]), args.size);
  };
  for (int64_t worker = 0; worker < args.num_workers; ++worker) {
    const int64_t first = worker * args.num_words;
    for (int64_t at = first + 1; at < first + args.num_words; ++at) {
      if (index(at - 1) < index(at) || index(at) == args.size) continue;
      return Invalid(
          "words must have increasing indices; words that stand for nothing come last. "
          "The sender or the network is faulty. Received: index ",
          index(at), " after ", index(at - 1), " in the words of worker ", worker,
          ", size=", args.size);
    }
  }
  return absl::OkStatus();
}

template <typename Device>
class MeanOfSparseOp : public ValuesOp<Device, MeanOfSparse> {
 public:
  explicit MeanOfSparseOp(OpKernelConstruction* context)
      : ValuesOp<Device, MeanOfSparse>(context) {
    OP_REQUIRES_OK(context, CheckSparseSize(this->count_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, MeanOfSparse* args,
                       Memory* memory) const override {
    args->size = this->count_;
    const Tensor& words = context->input(0);
    TF_RETURN_IF_ERROR(CheckRank("words", words, 2));
    args->words = Data<uint32_t>(words);
    args->num_workers = words.dim_size(0);
    args->num_words = words.dim_size(1);
    TF_RETURN_IF_ERROR(CheckWorkers("words", words));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, 2, args));
    TF_RETURN_IF_ERROR(WorkersScale(context, 1, "scale", args->num_workers,
                                    args->num_blocks, &args->scale));
    // Not checked on a GPU, for which the op would have to wait. Its kernel stays
    // inside its buffers with any words, as the CPU's does.
    if constexpr (Device::kOnHost) TF_RETURN_IF_ERROR(CheckOrder(*args));
    return OutputParts<Device>(context, this->sizes_, memory, args);
  }
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_SPARSE_KERNELS_H_
