// The ops' kernels, for any device: they check arguments, allocate results and hand the
// struct of ../kernels.h to `Device::Launch`.
//
// A device says whether the host can read its memory (`kOnHost`). Only there are the
// contents of row_splits checked: a GPU would have to be waited for. There, a caller
// answers for them; tfgradcomp makes them from the shapes of variables.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_KERNELS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "../kernels.h"
#include "../word_format.h"
#include "arguments.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/errors.h"

namespace tfgradcomp {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// Tensors may begin anywhere inside a buffer: `Tensor::flat` would end the process
// where one is not aligned as Eigen likes it.
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

// An attribute that may be there or not is a list of at most one.
inline absl::Status CheckOptional(const char* name, int64_t length) {
  if (length <= 1) return absl::OkStatus();
  return Invalid(name, " must be a list of at most one tensor. Received: ", length,
                 " tensors");
}

// What is kept until a kernel has been launched; then the device gives the memory to
// what is launched later only.
struct Memory {
  // Of a CutVector.
  struct Cut {
    std::vector<float*> parts;
    std::vector<int64_t> splits = {0};
  };

  Tensor scratch;
  Cut cut, moments;
  Tensor words, count;  // Of words whose number only the kernel finds.
};

// What all ops do. The attributes are read by the constructors below.
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

  // What there is to do when the kernel has been launched.
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

// The vector that says what the size is.
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

// The stream that input `index` is, or null where there are no inputs left.
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

// Rows of N workers.
inline absl::Status CheckWorkers(const char* name, const Tensor& tensor) {
  if (tensor.dim_size(0) >= 1) return absl::OkStatus();
  return Invalid(name, " must be those of one worker at least. Received: ", name,
                 " of shape ", tensor.shape().DebugString());
}

// The words of N workers, [N, WordsFor(size, base)].
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

inline absl::Status OutputWords(OpKernelContext* context, int index, int64_t size,
                                int64_t base, uint32_t** data) {
  return Output(context, index, TensorShape({tfgradcomp_format::WordsFor(size, base)}),
                data);
}

// Float64 scratch.
inline absl::Status Scratch(OpKernelContext* context, int64_t size, Memory* memory,
                            double** data) {
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_DOUBLE, TensorShape({size}),
                                            &memory->scratch));
  *data = Data<double>(&memory->scratch);
  return absl::OkStatus();
}

// The vector of these tensors.
template <typename T>
void SetParts(const Memory::Cut& cut, CutVector<T>* vector) {
  vector->num_parts = static_cast<int64_t>(cut.parts.size());
  if (vector->num_parts == 1) {
    vector->whole = cut.parts[0];
  } else {
    vector->parts = cut.parts.data();
    vector->splits = cut.splits.data();
  }
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
                         const char* scale_name, Memory::Cut* cut,
                         CutVector<const float>* vector) {
  tensorflow::OpInputList list;
  TF_RETURN_IF_ERROR(context->input_list(name, &list));
  TF_RETURN_IF_ERROR(CheckParts<Device>(name, list.size()));
  for (const Tensor& part : list) {
    cut->parts.push_back(static_cast<float*>(part.data()));
    cut->splits.push_back(cut->splits.back() + part.NumElements());
  }
  SetParts(*cut, vector);
  TF_RETURN_IF_ERROR(
      tensorflow::GetNodeAttr(context->op_kernel().def(), scale_name, &vector->scale));
  if (Device::kOnHost || vector->scale == 1) return absl::OkStatus();
  return Invalid(scale_name, " must be 1 on this device. Received: ", scale_name, "=",
                 vector->scale);
}

// The vector x, whose parts are the first inputs, and how many they are.
template <typename Device, typename Args>
absl::Status InputParts(OpKernelContext* context, Memory* memory, Args* args,
                        int* num_parts) {
  TF_RETURN_IF_ERROR(
      InputVector<Device>(context, "x", "x_scale", &memory->cut, &args->x));
  *num_parts = static_cast<int>(memory->cut.parts.size());
  args->size = memory->cut.splits.back();
  return absl::OkStatus();
}

// The vector of values, whose parts are the only outputs.
template <typename Device, typename Args>
absl::Status OutputParts(OpKernelContext* context, const std::vector<int64_t>& sizes,
                         Memory* memory, Args* args) {
  TF_RETURN_IF_ERROR(CheckParts<Device>("values", context->num_outputs()));
  Memory::Cut* const cut = &memory->cut;
  for (int i = 0; i < context->num_outputs(); ++i) {
    cut->parts.push_back(nullptr);
    cut->splits.push_back(cut->splits.back() + sizes[i]);
    TF_RETURN_IF_ERROR(Output(context, i, TensorShape({sizes[i]}), &cut->parts.back()));
  }
  SetParts(*cut, &args->values);
  return absl::OkStatus();
}

// What writes a vector of `count` values, in parts of the given sizes.
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
  }

 protected:
  int64_t count_ = 0;
  std::vector<int64_t> sizes_;
};

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
    // Without rows there is nothing to compute, whatever the count.
    args->size = shape.num_elements() > 0 ? count_ : 0;
    args->rows = args->size > 0 ? shape.num_elements() / count_ : 0;
    args->base = base_;
    return Output(context, 0, shape, &args->codes);
  }

  int64_t base_, count_;
};

template <typename Device>
class PackSignsOp : public KernelOp<Device, PackSigns> {
 public:
  using KernelOp<Device, PackSigns>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, PackSigns* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(OptionalStream(context, parts, &args->stream));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, args->size, 2, &args->words));
    return Output(context, 1, TensorShape({}), &args->nonfinite);
  }
};

template <typename Device>
class PackMomentumSignsOp : public KernelOp<Device, PackMomentumSigns> {
 public:
  explicit PackMomentumSignsOp(OpKernelConstruction* context)
      : KernelOp<Device, PackMomentumSigns>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("beta", &beta_));
    OP_REQUIRES_OK(context, context->GetAttr("one_minus_beta", &one_minus_beta_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, PackMomentumSigns* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Vector(context, parts, "momentum", args->size, &args->momentum));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 1, "warming_up", &args->warming_up));
    TF_RETURN_IF_ERROR(OptionalStream(context, parts + 2, &args->stream));
    args->beta = beta_;
    args->one_minus_beta = one_minus_beta_;
    TF_RETURN_IF_ERROR(OutputWords(context, 0, args->size, 2, &args->words));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({args->size}), &args->new_momentum));
    return Output(context, 2, TensorShape({}), &args->nonfinite);
  }

  float beta_, one_minus_beta_;
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
class BlockStatisticsOp : public KernelOp<Device, BlockStatistics> {
 public:
  using KernelOp<Device, BlockStatistics>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, BlockStatistics* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, parts, args));
    const int64_t slots = tfgradcomp_format::SlotsFor(args->size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, 5 * slots, memory, &args->scratch));
    return Output(context, 0, TensorShape({5, args->num_blocks}), &args->statistics);
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
  std::vector<int64_t> sum_base_;  // One at most.
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
    return OutputParts<Device>(context, this->sizes_, memory, args);
  }

  int64_t base_, step_, zero_;
};

template <typename Device>
class MeanOfSignsOp : public ValuesOp<Device, MeanOfSigns> {
 public:
  using ValuesOp<Device, MeanOfSigns>::ValuesOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanOfSigns* args,
                       Memory* memory) const override {
    args->size = this->count_;
    TF_RETURN_IF_ERROR(WorkersWords(context, 0, "words", this->count_, 2,
                                    &args->num_workers, &args->words));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, 2, args));
    TF_RETURN_IF_ERROR(WorkersScale(context, 1, "scale", args->num_workers,
                                    args->num_blocks, &args->scale));
    return OutputParts<Device>(context, this->sizes_, memory, args);
  }
};

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
    return OutputParts<Device>(context, this->sizes_, memory, args);
  }
};

template <typename Device>
class MajorityVoteOp : public KernelOp<Device, MajorityVote> {
 public:
  explicit MajorityVoteOp(OpKernelConstruction* context)
      : KernelOp<Device, MajorityVote>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES_OK(context, CheckCount(count_));
    OP_REQUIRES_OK(context, context->GetAttr("base", &base_));
    OP_REQUIRES_OK(context, context->GetAttr("reply_base", &reply_base_));
    OP_REQUIRES_OK(context, CheckVoteBases(base_, reply_base_));
    OP_REQUIRES_OK(context, context->GetAttr("quorum", &quorum_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, MajorityVote* args,
                       Memory* memory) const override {
    args->size = count_;
    args->base = base_;
    args->reply_base = reply_base_;
    args->quorum = quorum_;
    TF_RETURN_IF_ERROR(WorkersWords(context, 0, "words", count_, base_,
                                    &args->num_workers, &args->words));
    TF_RETURN_IF_ERROR(OptionalStream(context, 1, &args->stream));
    return OutputWords(context, 0, count_, reply_base_, &args->votes);
  }

  int64_t count_, base_, reply_base_, quorum_;
};

template <typename Device>
class SignErrorFeedbackOp : public KernelOp<Device, SignErrorFeedback> {
 public:
  explicit SignErrorFeedbackOp(OpKernelConstruction* context)
      : KernelOp<Device, SignErrorFeedback>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("mu", &mu_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, SignErrorFeedback* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, &parts));
    const int64_t size = args->size;
    TF_RETURN_IF_ERROR(Vector(context, parts, "residual", size, &args->residual));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 1, "ratio", &args->ratio));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 2, "moving", &args->moving));
    TF_RETURN_IF_ERROR(Blocks<Device>(context, parts + 3, args));
    TF_RETURN_IF_ERROR(
        OptionalVector(context, parts + 4, "momentum", size, &args->momentum));
    args->mu = mu_;
    const int64_t slots = tfgradcomp_format::SlotsFor(size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, slots, memory, &args->scratch));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, size, 2, &args->words));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({args->num_blocks}), &args->scale));
    TF_RETURN_IF_ERROR(Output(context, 2, TensorShape({size}), &args->new_residual));
    if (args->momentum == nullptr) return absl::OkStatus();
    return Output(context, 3, TensorShape({size}), &args->new_momentum);
  }

  float mu_;
};

// What the server's ops read alike: what was sent is inputs 0 and 1, the residual 2,
// the ratio 3.
template <typename Device, typename Args>
absl::Status ServerInputs(OpKernelContext* context, int row_splits, Args* args) {
  TF_RETURN_IF_ERROR(FirstVector(context, 2, "residual", &args->size, &args->residual));
  TF_RETURN_IF_ERROR(WorkersWords(context, 0, "sent_words", args->size, 2,
                                  &args->num_workers, &args->sent_words));
  TF_RETURN_IF_ERROR(Scalar(context, 3, "ratio", &args->ratio));
  TF_RETURN_IF_ERROR(Blocks<Device>(context, row_splits, args));
  return WorkersScale(context, 1, "sent_scale", args->num_workers, args->num_blocks,
                      &args->sent_scale);
}

template <typename Device>
class MeanSignErrorFeedbackOp : public KernelOp<Device, MeanSignErrorFeedback> {
 public:
  using KernelOp<Device, MeanSignErrorFeedback>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanSignErrorFeedback* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(ServerInputs<Device>(context, 5, args));
    TF_RETURN_IF_ERROR(Scalar(context, 4, "moving", &args->moving));
    const int64_t size = args->size;
    const int64_t slots = tfgradcomp_format::SlotsFor(size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, slots, memory, &args->scratch));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, size, 2, &args->words));
    TF_RETURN_IF_ERROR(
        Output(context, 1, TensorShape({args->num_blocks}), &args->scale));
    return Output(context, 2, TensorShape({size}), &args->new_residual);
  }
};

template <typename Device>
class MeanSignSumsOp : public KernelOp<Device, MeanSignSums> {
 public:
  using KernelOp<Device, MeanSignSums>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanSignSums* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(ServerInputs<Device>(context, 4, args));
    const int64_t slots = tfgradcomp_format::SlotsFor(args->size, args->num_blocks);
    TF_RETURN_IF_ERROR(Scratch(context, slots, memory, &args->scratch));
    TF_RETURN_IF_ERROR(OutputWords(context, 0, args->size, 2, &args->words));
    return Output(context, 1, TensorShape({args->num_blocks}), &args->l1);
  }
};

template <typename Device>
class MeanSignResidualOp : public KernelOp<Device, MeanSignResidual> {
 public:
  using KernelOp<Device, MeanSignResidual>::KernelOp;

 private:
  absl::Status Prepare(OpKernelContext* context, MeanSignResidual* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(ServerInputs<Device>(context, 7, args));
    TF_RETURN_IF_ERROR(Scalar(context, 4, "moving", &args->moving));
    const Tensor& words = context->input(5);
    const int64_t expected = tfgradcomp_format::WordsFor(args->size, 2);
    TF_RETURN_IF_ERROR(CheckShape("words", words, TensorShape({expected})));
    args->words = Data<uint32_t>(words);
    TF_RETURN_IF_ERROR(Vector(context, 6, "scale", args->num_blocks, &args->scale));
    return Output(context, 0, TensorShape({args->size}), &args->new_residual);
  }
};

// What packs sparse words, as many as the kernel finds. They are the first output.
template <typename Device, typename Args>
class SparseOp : public KernelOp<Device, Args> {
 public:
  explicit SparseOp(OpKernelConstruction* context) : KernelOp<Device, Args>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(context, context->GetAttr("decay", &decay_));
    OP_REQUIRES_OK(context, CheckVariance(alpha_, decay_));
  }

 protected:
  // x, moments and the residual, the first inputs; returns where the next one is.
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

  // Room for all words that there may be, and for what else the kernel needs.
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
    TF_RETURN_IF_ERROR(Output(context, 2, TensorShape({size}), &args->new_residual));
    TF_RETURN_IF_ERROR(Output(context, 3, TensorShape({size}), &args->new_variance));
    return Output(context, 4, TensorShape({}), &args->nonfinite);
  }
};

template <typename Device>
class PackOverThresholdOp : public SparseOp<Device, PackOverThreshold> {
 public:
  explicit PackOverThresholdOp(OpKernelConstruction* context)
      : SparseOp<Device, PackOverThreshold>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("threshold", &threshold_));
    OP_REQUIRES_OK(context, CheckThreshold(threshold_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, PackOverThreshold* args,
                       Memory* memory) const override {
    int next;
    TF_RETURN_IF_ERROR(this->Gathered(context, args, memory, &next));
    const int64_t size = args->size;
    TF_RETURN_IF_ERROR(
        OptionalVector(context, next, "variance", size, &args->variance));
    const bool has_variance = context->num_inputs() > next;
    if (has_variance != (args->moments.num_parts > 0)) {
      return Invalid(
          "moments and variance must be given both or neither. Received: moments of ",
          args->moments.num_parts, " tensors, variance of ",
          context->num_inputs() - next);
    }
    args->threshold = threshold_;
    TF_RETURN_IF_ERROR(this->Room(context, 0, args, memory));
    TF_RETURN_IF_ERROR(Output(context, 1, TensorShape({size}), &args->new_residual));
    TF_RETURN_IF_ERROR(Output(context, 2, TensorShape({}), &args->nonfinite));
    if (!has_variance) return absl::OkStatus();
    return Output(context, 3, TensorShape({size}), &args->new_variance);
  }

  float threshold_;
};

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
    return OutputParts<Device>(context, this->sizes_, memory, args);
  }
};

#define TFGRADCOMP_REGISTER_KERNEL(Kernel, DEVICE, OnDevice)          \
  REGISTER_KERNEL_BUILDER(Name("Tfgradcomp>" #Kernel).Device(DEVICE), \
                          Kernel##Op<OnDevice>)

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_KERNELS_H_
