// The ops' kernels for the largest elements of chunks.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNKS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNKS_KERNELS_H_

#include <cstdint>

#include "../chunks.h"
#include "../kernels.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

// The attributes that state the format.
struct ChunkAttributes {
  absl::Status Read(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("k", &k));
    TF_RETURN_IF_ERROR(context->GetAttr("chunk", &chunk));
    TF_RETURN_IF_ERROR(context->GetAttr("bits", &bits));
    return CheckChunkFormat(k, chunk, bits);
  }

  // Reads the blocks from input `index`. None may be longer than a chunk.
  template <typename Device, typename Args>
  absl::Status Fill(OpKernelContext* context, int index, Args* args) const {
    args->k = k;
    args->chunk = chunk;
    args->bits = bits;
    TF_RETURN_IF_ERROR(Blocks<Device>(context, index, args));
    if constexpr (Device::kOnHost) {
      for (int64_t b = 0; b < args->num_blocks; ++b) {
        const int64_t width = args->row_splits[b + 1] - args->row_splits[b];
        if (width <= chunk) continue;
        return Invalid("row_splits must have blocks of at most chunk=", chunk,
                       " elements. Received: a block of ", width, " elements");
      }
    }
    return absl::OkStatus();
  }

  int64_t k, chunk, bits;
};

template <typename Device>
class PackLargestOp : public KernelOp<Device, PackLargest> {
 public:
  explicit PackLargestOp(OpKernelConstruction* context)
      : KernelOp<Device, PackLargest>(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, PackLargest* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(attributes_.Fill<Device>(context, parts, args));
    const tfgradcomp_format::ChunkFormat format(*args);
    const int64_t blocks = args->num_blocks;
    TF_RETURN_IF_ERROR(
        Output(context, 0, TensorShape({blocks * format.words}), &args->words));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({blocks, format.levels}), &args->levels));
    return Output(context, 2, TensorShape({}), &args->nonfinite);
  }

  ChunkAttributes attributes_;
};

template <typename Device>
class MeanOfLargestOp : public ValuesOp<Device, MeanOfLargest> {
 public:
  explicit MeanOfLargestOp(OpKernelConstruction* context)
      : ValuesOp<Device, MeanOfLargest>(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, MeanOfLargest* args,
                       Memory* memory) const override {
    args->size = this->count_;
    TF_RETURN_IF_ERROR(attributes_.Fill<Device>(context, 2, args));
    const tfgradcomp_format::ChunkFormat format(*args);
    const int64_t blocks = args->num_blocks;
    const Tensor &words = context->input(0), &levels = context->input(1);
    TF_RETURN_IF_ERROR(CheckRank("words", words, 2));
    TF_RETURN_IF_ERROR(CheckWorkers("words", words));
    args->num_workers = words.dim_size(0);
    TF_RETURN_IF_ERROR(CheckShape(
        "words", words, TensorShape({args->num_workers, blocks * format.words})));
    TF_RETURN_IF_ERROR(CheckShape(
        "levels", levels, TensorShape({args->num_workers, blocks, format.levels})));
    args->words = Data<uint32_t>(words);
    args->levels = Data<float>(levels);
    return OutputParts<Device>(context, this->sizes_, memory, args);
  }

  ChunkAttributes attributes_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNKS_KERNELS_H_
