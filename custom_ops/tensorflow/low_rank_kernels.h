// The ops' kernels for factors of matrices.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LOW_RANK_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LOW_RANK_KERNELS_H_

#include <cstdint>
#include <vector>

#include "../kernels.h"
#include "../matrices.h"
#include "arguments.h"
#include "kernel_op.h"

namespace tfgradcomp {

// The attributes of an op on matrices.
class MatricesOfOp {
 public:
  absl::Status Read(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("rows", &rows_));
    TF_RETURN_IF_ERROR(context->GetAttr("columns", &columns_));
    TF_RETURN_IF_ERROR(context->GetAttr("rank", &rank_));
    return CheckMatrices(rows_, columns_, rank_, &sizes_);
  }

  template <typename Args>
  void Fill(Args* args) const {
    args->size = sizes_.element;
    args->rows = rows_.data();
    args->columns = columns_.data();
    args->num_tensors = static_cast<int64_t>(rows_.size());
    args->rank = rank_;
  }

  // The sizes of the arrays.
  const MatrixTensor& sizes() const { return sizes_; }

 private:
  std::vector<int64_t> rows_, columns_;
  int64_t rank_;
  MatrixTensor sizes_ = {};
};

// Reads the parts of x, and their number.
template <typename Device, typename Args>
absl::Status PartsOfMatrices(OpKernelContext* context, const MatricesOfOp& matrices,
                             Memory* memory, Args* args, int* num_parts) {
  TF_RETURN_IF_ERROR(InputParts<Device>(context, memory, args, num_parts));
  const int64_t size = args->size;
  matrices.Fill(args);
  if (size == args->size) return absl::OkStatus();
  return Invalid("x must have the ", args->size,
                 " elements of all tensors. Received: x of ", size, " elements");
}

// Reads both factors of a product, from input `first` on.
template <typename Args>
absl::Status FactorsOfProduct(OpKernelContext* context, const MatricesOfOp& matrices,
                              int first, Args* args) {
  matrices.Fill(args);
  const MatrixTensor& sizes = matrices.sizes();
  TF_RETURN_IF_ERROR(Vector(context, first, "left", sizes.left, &args->left));
  return Vector(context, first + 1, "right", sizes.value, &args->right);
}

// A base class with the attributes of an op on matrices.
template <typename Base>
class OnMatrices : public Base {
 public:
  explicit OnMatrices(OpKernelConstruction* context) : Base(context) {
    OP_REQUIRES_OK(context, matrices_.Read(context));
  }

 protected:
  MatricesOfOp matrices_;
};

template <typename Device>
class MultiplyMatricesOp : public OnMatrices<KernelOp<Device, MultiplyMatrices>> {
 public:
  using OnMatrices<KernelOp<Device, MultiplyMatrices>>::OnMatrices;

 private:
  absl::Status Prepare(OpKernelContext* context, MultiplyMatrices* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(
        PartsOfMatrices<Device>(context, this->matrices_, memory, args, &parts));
    const MatrixTensor& sizes = this->matrices_.sizes();
    TF_RETURN_IF_ERROR(Vector(context, parts, "right", sizes.right, &args->right));
    return Output(context, 0, TensorShape({sizes.left}), &args->products);
  }
};

template <typename Device>
class MultiplySumOp : public OnMatrices<KernelOp<Device, MultiplySum>> {
 public:
  using OnMatrices<KernelOp<Device, MultiplySum>>::OnMatrices;

 private:
  absl::Status Prepare(OpKernelContext* context, MultiplySum* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(
        PartsOfMatrices<Device>(context, this->matrices_, memory, args, &parts));
    const MatrixTensor& sizes = this->matrices_.sizes();
    TF_RETURN_IF_ERROR(Vector(context, parts, "y", args->size, &args->y));
    TF_RETURN_IF_ERROR(Scalar(context, parts + 1, "factor", &args->factor));
    TF_RETURN_IF_ERROR(FactorsOfProduct(context, this->matrices_, parts + 2, args));
    TF_RETURN_IF_ERROR(Vector(context, parts + 4, "query", sizes.right, &args->query));
    TF_RETURN_IF_ERROR(OutputState<Device>(context, 0, args->size, &args->total));
    return Output(context, 1, TensorShape({sizes.left}), &args->products);
  }
};

template <typename Device>
class MultiplyTransposedOp : public OnMatrices<KernelOp<Device, MultiplyTransposed>> {
 public:
  using OnMatrices<KernelOp<Device, MultiplyTransposed>>::OnMatrices;

 private:
  absl::Status Prepare(OpKernelContext* context, MultiplyTransposed* args,
                       Memory* memory) const override {
    int parts;
    TF_RETURN_IF_ERROR(
        PartsOfMatrices<Device>(context, this->matrices_, memory, args, &parts));
    const MatrixTensor& sizes = this->matrices_.sizes();
    TF_RETURN_IF_ERROR(Vector(context, parts, "left", sizes.left, &args->left));
    if constexpr (!Device::kOnHost) {
      TF_RETURN_IF_ERROR(context->allocate_temp(
          tensorflow::DT_FLOAT, TensorShape({ScratchOf(*args)}), &memory->scratch));
      args->scratch = Data<float>(&memory->scratch);
    }
    return Output(context, 0, TensorShape({sizes.value}), &args->factors);
  }
};

template <typename Device>
class MultiplyFactorsOp : public OnMatrices<ValuesOp<Device, MultiplyFactors>> {
 public:
  explicit MultiplyFactorsOp(OpKernelConstruction* context)
      : OnMatrices<ValuesOp<Device, MultiplyFactors>>(context) {
    OP_REQUIRES_OK(context,
                   CheckSizes(this->sizes_, static_cast<int64_t>(this->sizes_.size()),
                              this->matrices_.sizes().element));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, MultiplyFactors* args,
                       Memory* memory) const override {
    TF_RETURN_IF_ERROR(FactorsOfProduct(context, this->matrices_, 0, args));
    return this->Values(context, memory, args);
  }
};

template <typename Device>
class SubtractFactorsOp : public OnMatrices<KernelOp<Device, SubtractFactors>> {
 public:
  using OnMatrices<KernelOp<Device, SubtractFactors>>::OnMatrices;

 private:
  absl::Status Prepare(OpKernelContext* context, SubtractFactors* args,
                       Memory*) const override {
    TF_RETURN_IF_ERROR(FactorsOfProduct(context, this->matrices_, 1, args));
    TF_RETURN_IF_ERROR(Vector(context, 0, "x", args->size, &args->x));
    return OutputState<Device>(context, 0, args->size, &args->difference, 0);
  }
};

template <typename Device>
class OrthonormalizeOp : public KernelOp<Device, Orthonormalize> {
 public:
  explicit OrthonormalizeOp(OpKernelConstruction* context)
      : KernelOp<Device, Orthonormalize>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("rows", &rows_));
    OP_REQUIRES_OK(context, context->GetAttr("rank", &rank_));
    OP_REQUIRES_OK(context, CheckFactors(rows_, rank_, &size_));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, Orthonormalize* args,
                       Memory* memory) const override {
    args->size = size_;
    args->rows = rows_.data();
    args->num_factors = static_cast<int64_t>(rows_.size());
    args->rank = rank_;
    TF_RETURN_IF_ERROR(Vector(context, 0, "x", size_, &args->x));
    TF_RETURN_IF_ERROR(Scratch(context, ScratchOf(*args), memory, &args->scratch));
    return Output(context, 0, TensorShape({size_}), &args->basis);
  }

  std::vector<int64_t> rows_;
  int64_t rank_, size_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_LOW_RANK_KERNELS_H_
