// The common part of the ops' kernels, on any device. A kernel checks its arguments,
// allocates its results and hands a struct of ../kernels.h to `Device::Launch`.
//
// `Device::kOnHost` says whether the host can read the memory of the device. Only then
// are the contents of row_splits checked: for a GPU, the check would have to wait until
// the GPU has finished. On a GPU the caller must pass correct row_splits; tfgradcomp
// computes them from the shapes of variables.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_KERNEL_OP_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_KERNEL_OP_H_

#include <cstdint>
#include <vector>

#include "../kernels.h"
#include "../word_format.h"
#include "arguments.h"
#include "cut.h"
#include "kept_memory.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/errors.h"
#include "updates.h"

namespace tfgradcomp {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// A tensor may begin anywhere inside a buffer: `Tensor::flat` would end the process if
// the tensor is not aligned as Eigen requires.
template <typename T>
const T* Data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data());
}

template <typename T>
T* Data(Tensor* tensor) {
  return static_cast<T*>(tensor->data());
}

inline absl::Status CheckShape(const char* name, const Tensor& tensor,
                               const TensorShape& expected) {
  if (tensor.shape() == expected) return absl::OkStatus();
  return Invalid(name, " must have the shape ", expected.DebugString(),
                 ". Received: ", name, " of shape ", tensor.shape().DebugString());
}

inline absl::Status CheckRank(const char* name, const Tensor& tensor, int rank) {
  if (tensor.dims() == rank) return absl::OkStatus();
  return Invalid(name, " must have ", rank, " axes. Received: ", name, " of shape ",
                 tensor.shape().DebugString());
}

// An optional input is a list of at most one tensor.
inline absl::Status CheckOptional(const char* name, int64_t length) {
  if (length <= 1) return absl::OkStatus();
  return Invalid(name, " must be a list of at most one tensor. Received: ", length,
                 " tensors");
}

// Memory that is kept until a kernel has been launched. When it is freed after that,
// the device gives it only to kernels that are launched later.
struct Memory {
  Tensor scratch;
  Cut cut, moments;
  UpdateMemory update;
  Tensor words, count;  // For words whose number only the kernel knows.
};

// The base class of all kernels. Subclasses read the attributes in their constructors.
template <typename Device, typename Args>
class KernelOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    Args args{};
    Memory memory;
    OP_REQUIRES_OK(context, Prepare(context, &args, &memory));
    OP_REQUIRES_OK(context, Device::Launch(context, args));
    OP_REQUIRES_OK(context, Finish(context, args, memory));
  }

 protected:
  // Checks the inputs, allocates the outputs and fills `args` with them.
  virtual absl::Status Prepare(OpKernelContext* context, Args* args,
                               Memory* memory) const = 0;

  // Completes the outputs after the kernel has been launched.
  virtual absl::Status Finish(OpKernelContext* context, const Args& args,
                              const Memory& memory) const {
    return absl::OkStatus();
  }
};

inline absl::Status Vector(OpKernelContext* context, int index, const char* name,
                           int64_t size, const float** data) {
  const Tensor& tensor = context->input(index);
  TF_RETURN_IF_ERROR(CheckShape(name, tensor, TensorShape({size})));
  *data = Data<float>(tensor);
  return absl::OkStatus();
}

// Reads the vector that determines the size.
template <typename T>
absl::Status FirstVector(OpKernelContext* context, int index, const char* name,
                         int64_t* size, const T** data) {
  const Tensor& tensor = context->input(index);
  TF_RETURN_IF_ERROR(CheckRank(name, tensor, 1));
  *size = tensor.dim_size(0);
  *data = Data<T>(tensor);
  return absl::OkStatus();
}

template <typename T>
absl::Status Scalar(OpKernelContext* context, int index, const char* name,
                    const T** data) {
  const Tensor& tensor = context->input(index);
  TF_RETURN_IF_ERROR(CheckShape(name, tensor, TensorShape({})));
  *data = Data<T>(tensor);
  return absl::OkStatus();
}

inline absl::Status Stream(OpKernelContext* context, int index, const uint64_t** data) {
  const Tensor& tensor = context->input(index);
  TF_RETURN_IF_ERROR(CheckShape("stream", tensor, TensorShape({3})));
  *data = Data<uint64_t>(tensor);
  return absl::OkStatus();
}

// Reads the stream from input `index`, or null if there are no inputs left.
inline absl::Status OptionalStream(OpKernelContext* context, int index,
                                   const uint64_t** data) {
  TF_RETURN_IF_ERROR(CheckOptional("stream", context->num_inputs() - index));
  if (index == context->num_inputs()) return absl::OkStatus();
  return Stream(context, index, data);
}

inline absl::Status OptionalVector(OpKernelContext* context, int index,
                                   const char* name, int64_t size, const float** data) {
  TF_RETURN_IF_ERROR(CheckOptional(name, context->num_inputs() - index));
  if (index == context->num_inputs()) return absl::OkStatus();
  return Vector(context, index, name, size, data);
}

template <typename Device, typename Args>
absl::Status Blocks(OpKernelContext* context, int index, Args* args) {
  const Tensor& tensor = context->input(index);
  TF_RETURN_IF_ERROR(CheckRank("row_splits", tensor, 1));
  const int64_t num_blocks = tensor.dim_size(0) - 1;
  if (num_blocks < 0 || num_blocks > args->size ||
      (num_blocks == 0 && args->size > 0)) {
    return Invalid(
        "row_splits must cut the ", args->size,
        " elements into blocks that are not empty. Received: row_splits of length ",
        num_blocks + 1);
  }
  args->row_splits = Data<int64_t>(tensor);
  args->num_blocks = num_blocks;
  if constexpr (Device::kOnHost) {
    const int64_t* splits = args->row_splits;
    bool fits = splits[0] == 0 && splits[num_blocks] == args->size;
    for (int64_t b = 0; b < num_blocks; ++b) fits &= splits[b] < splits[b + 1];
    if (!fits) {
      return Invalid(
          "row_splits must begin with 0, increase and end with the number of "
          "elements, ",
          args->size, ". Received: row_splits=", tensor.SummarizeValue(16));
    }
  }
  return absl::OkStatus();
}

// Checks that there are rows of at least one worker.
inline absl::Status CheckWorkers(const char* name, const Tensor& tensor) {
  if (tensor.dim_size(0) >= 1) return absl::OkStatus();
  return Invalid(name, " must be those of one worker at least. Received: ", name,
                 " of shape ", tensor.shape().DebugString());
}

// Reads the words of N workers, [N, WordsFor(size, base)].
inline absl::Status WorkersWords(OpKernelContext* context, int index, const char* name,
                                 int64_t size, int64_t base, int64_t* num_workers,
                                 const uint32_t** words) {
  const Tensor& tensor = context->input(index);
  TF_RETURN_IF_ERROR(CheckRank(name, tensor, 2));
  *num_workers = tensor.dim_size(0);
  TF_RETURN_IF_ERROR(CheckWorkers(name, tensor));
  TF_RETURN_IF_ERROR(
      CheckShape(name, tensor,
                 TensorShape({*num_workers, tfgradcomp_format::WordsFor(size, base)})));
  *words = Data<uint32_t>(tensor);
  return absl::OkStatus();
}

inline absl::Status WorkersScale(OpKernelContext* context, int index, const char* name,
                                 int64_t num_workers, int64_t num_blocks,
                                 const float** scale) {
  const Tensor& tensor = context->input(index);
  TF_RETURN_IF_ERROR(CheckShape(name, tensor, TensorShape({num_workers, num_blocks})));
  *scale = Data<float>(tensor);
  return absl::OkStatus();
}

template <typename T>
absl::Status Output(OpKernelContext* context, int index, const TensorShape& shape,
                    T** data) {
  Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(index, shape, &tensor));
  *data = Data<T>(tensor);
  return absl::OkStatus();
}

// A vector that the next step reads as the state of a method, or that is as large. It
// takes the memory of input `reused` if there is one and nobody else will read it.
template <typename Device>
absl::Status OutputState(OpKernelContext* context, int index, int64_t size,
                         float** data, int reused = -1) {
  const TensorShape shape({size});
  Tensor* output;
  if (reused >= 0 &&
      context->forward_input_to_output_with_shape(reused, index, shape, &output)) {
    *data = Data<float>(output);
    return absl::OkStatus();
  }
  if (!Device::kOnHost || size * sizeof(float) < kKeptBytes) {
    return Output(context, index, shape, data);
  }
  Tensor tensor(KeptMemory::Get(), tensorflow::DT_FLOAT, shape);
  if (!tensor.IsInitialized()) {
    return tensorflow::errors::ResourceExhausted("No memory for a state of ", size,
                                                 " floats");
  }
  *data = Data<float>(&tensor);
  context->set_output(index, tensor);
  return absl::OkStatus();
}

inline absl::Status OutputWords(OpKernelContext* context, int index, int64_t size,
                                int64_t base, uint32_t** data) {
  return Output(context, index, TensorShape({tfgradcomp_format::WordsFor(size, base)}),
                data);
}

// Allocates float64 scratch.
inline absl::Status Scratch(OpKernelContext* context, int64_t size, Memory* memory,
                            double** data) {
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_DOUBLE, TensorShape({size}),
                                            &memory->scratch));
  *data = Data<double>(&memory->scratch);
  return absl::OkStatus();
}

template <typename Device>
absl::Status CheckParts(const char* name, int64_t num_parts) {
  if (Device::kOnHost || num_parts == 1) return absl::OkStatus();
  return Invalid(name,
                 " must be one tensor on a GPU; tf.concat and tf.split do the rest. ",
                 "Received: ", num_parts, " tensors");
}

// Reads the parts of a vector, and its scale from the attribute `scale_name`.
template <typename Device>
absl::Status InputVector(OpKernelContext* context, const char* name,
                         const char* scale_name, Cut* cut,
                         CutVector<const float>* vector) {
  tensorflow::OpInputList list;
  TF_RETURN_IF_ERROR(context->input_list(name, &list));
  TF_RETURN_IF_ERROR(CheckParts<Device>(name, list.size()));
  for (const Tensor& part : list) {
    cut->Add(static_cast<float*>(part.data()), part.NumElements());
  }
  SetParts(*cut, vector);
  TF_RETURN_IF_ERROR(
      tensorflow::GetNodeAttr(context->op_kernel().def(), scale_name, &vector->scale));
  if (Device::kOnHost || vector->scale == 1) return absl::OkStatus();
  return Invalid(scale_name, " must be 1 on this device. Received: ", scale_name, "=",
                 vector->scale);
}

// Reads the vector x, whose parts are the first inputs, and the number of parts.
template <typename Device, typename Args>
absl::Status InputParts(OpKernelContext* context, Memory* memory, Args* args,
                        int* num_parts) {
  TF_RETURN_IF_ERROR(
      InputVector<Device>(context, "x", "x_scale", &memory->cut, &args->x));
  *num_parts = static_cast<int>(memory->cut.parts.size());
  args->size = memory->cut.splits.back();
  return absl::OkStatus();
}

// Allocates the vector of values, whose parts are the only outputs.
template <typename Device, typename Args>
absl::Status OutputParts(OpKernelContext* context, const std::vector<int64_t>& sizes,
                         Memory* memory, Args* args) {
  TF_RETURN_IF_ERROR(CheckParts<Device>("values", context->num_outputs()));
  Cut* const cut = &memory->cut;
  for (int i = 0; i < context->num_outputs(); ++i) {
    cut->parts.push_back(nullptr);
    cut->splits.push_back(cut->splits.back() + sizes[i]);
    TF_RETURN_IF_ERROR(Output(context, i, TensorShape({sizes[i]}), &cut->parts.back()));
  }
  SetParts(*cut, &args->values);
  return absl::OkStatus();
}

// The base class of kernels that write a vector of `count` values in parts of given
// sizes, or update variables by it (updates.h).
template <typename Device, typename Args>
class ValuesOp : public KernelOp<Device, Args> {
 public:
  explicit ValuesOp(OpKernelConstruction* context) : KernelOp<Device, Args>(context) {
    int64_t num_values;
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES_OK(context, CheckCount(count_));
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(context, context->GetAttr("num_values", &num_values));
    OP_REQUIRES_OK(context, CheckSizes(sizes_, num_values, count_));
    updates_ = context->HasAttr("rule");
    if (updates_) OP_REQUIRES_OK(context, updater_.Read(context));
  }

 protected:
  absl::Status Values(OpKernelContext* context, Memory* memory, Args* args) const {
    if (!updates_) return OutputParts<Device>(context, sizes_, memory, args);
    if constexpr (!Device::kOnHost) {
      return Invalid("variables are updated on a CPU only");
    } else {
      args->update = &memory->update.update;
      return updater_.Open(context, sizes_, &memory->update);
    }
  }

  int64_t count_ = 0;
  std::vector<int64_t> sizes_;

 private:
  bool updates_ = false;
  Updater updater_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_KERNEL_OP_H_
