// Variables that an op updates in place by the values that it decodes.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_UPDATES_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_UPDATES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../kernels.h"
#include "arguments.h"
#include "cut.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfgradcomp {

// References and locks that are kept until the variables are updated.
struct UpdateMemory {
  using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

  Update update;
  Cut w, m, v;
  std::vector<float> padding, decays, floors;
  std::vector<Variable> variables;
  std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks;
};

// Opens the variables of an op with the attributes `rule` and `offsets`, the inputs
// `coefficients`, `w`, `m`, `v` and `decays`. Piece i of the values is for w[i], m[i]
// and v[i] from element offsets[i] on; a first piece without a variable is padding.
// `decays` is empty, or has the rate and the decay of each piece. `coefficients` of
// kFrozenAdam are followed by the floor of each piece.
class Updater {
 public:
  absl::Status Read(tensorflow::OpKernelConstruction* context) {
    std::string rule;
    TF_RETURN_IF_ERROR(context->GetAttr("rule", &rule));
    TF_RETURN_IF_ERROR(CheckUpdateRule(rule, &rule_, &num_coefficients_, &num_slots_));
    return context->GetAttr("offsets", &offsets_);
  }

  absl::Status Open(tensorflow::OpKernelContext* context,
                    const std::vector<int64_t>& sizes, UpdateMemory* memory) const {
    const tensorflow::Tensor* coefficients;
    TF_RETURN_IF_ERROR(context->input("coefficients", &coefficients));
    const bool has_floors = rule_ == UpdateRule::kFrozenAdam;
    const int64_t expected = num_coefficients_ + (has_floors ? offsets_.size() : 0);
    if (coefficients->NumElements() != expected) {
      return Invalid("coefficients must be ", expected,
                     " for this rule. Received: ", coefficients->NumElements());
    }
    Update* const update = &memory->update;
    update->rule = rule_;
    update->coefficients = static_cast<const float*>(coefficients->data());
    struct {
      const char* name;
      Cut* cut;
      CutVector<float>* vector;
    } const lists[] = {{"w", &memory->w, &update->w},
                       {"m", &memory->m, &update->m},
                       {"v", &memory->v, &update->v}};
    for (int i = 0; i < 3; ++i) {
      tensorflow::OpInputList list;
      TF_RETURN_IF_ERROR(context->input_list(lists[i].name, &list));
      TF_RETURN_IF_ERROR(CheckList(lists[i].name, list.size(), i <= num_slots_, sizes));
      for (const tensorflow::Tensor& handle : list) {
        UpdateMemory::Variable variable;
        TF_RETURN_IF_ERROR(tensorflow::LookupResource(
            context, handle.scalar<tensorflow::ResourceHandle>()(), &variable));
        memory->variables.push_back(std::move(variable));
      }
    }
    Lock(memory);
    // In the order of the lists. A list that the rule lacks is empty.
    auto variable = memory->variables.begin();
    for (int i = 0; i <= num_slots_; ++i) {
      TF_RETURN_IF_ERROR(Fill(context, sizes, &variable, memory, lists[i].cut));
      SetParts(*lists[i].cut, lists[i].vector);
    }
    if (has_floors) {
      update->floors = ForParts(update->coefficients + num_coefficients_, sizes.size(),
                                &memory->floors);
    }
    return ReadDecays(context, sizes.size(), memory);
  }

 private:
  absl::Status ReadDecays(tensorflow::OpKernelContext* context, size_t num_parts,
                          UpdateMemory* memory) const {
    const tensorflow::Tensor* decays;
    TF_RETURN_IF_ERROR(context->input("decays", &decays));
    const size_t count = decays->NumElements();
    if (count == 0) return absl::OkStatus();
    if (count != 1 + offsets_.size()) {
      return Invalid("decays must be empty, or a rate and the decays of ",
                     offsets_.size(), " variables. Received: ", count, " numbers");
    }
    const float* const values = static_cast<const float*>(decays->data());
    // Padding does not decay.
    memory->update.decays = ForParts(values + 1, num_parts, &memory->decays);
    memory->update.rate = values[0];
    return absl::OkStatus();
  }

  // Copies a number for each variable; padding has 0.
  const float* ForParts(const float* values, size_t num_parts,
                        std::vector<float>* found) const {
    found->assign(num_parts - offsets_.size(), 0.0f);
    found->insert(found->end(), values, values + offsets_.size());
    return found->data();
  }

  absl::Status CheckList(const char* name, int64_t length, bool is_used,
                         const std::vector<int64_t>& sizes) const {
    const int64_t expected = is_used ? static_cast<int64_t>(offsets_.size()) : 0;
    const int64_t padding = static_cast<int64_t>(sizes.size() - offsets_.size());
    if (length == expected && (padding == 0 || padding == 1)) return absl::OkStatus();
    return Invalid(name, " must be ", expected,
                   " variables, one for each offset and for each of sizes, or all of "
                   "sizes but the first. Received: ",
                   length, " variables, ", offsets_.size(), " offsets, ", sizes.size(),
                   " sizes");
  }

  // Locks in the order of addresses, as TensorFlow does, to prevent a deadlock.
  static void Lock(UpdateMemory* memory) {
    std::vector<tensorflow::mutex*> mutexes;
    for (const auto& variable : memory->variables) mutexes.push_back(variable->mu());
    std::sort(mutexes.begin(), mutexes.end());
    mutexes.erase(std::unique(mutexes.begin(), mutexes.end()), mutexes.end());
    for (tensorflow::mutex* mutex : mutexes) {
      memory->locks.push_back(std::make_unique<tensorflow::mutex_lock>(*mutex));
    }
  }

  // Adds the pieces of variables to a vector.
  absl::Status Fill(tensorflow::OpKernelContext* context,
                    const std::vector<int64_t>& sizes,
                    std::vector<UpdateMemory::Variable>::iterator* variable,
                    UpdateMemory* memory, Cut* cut) const {
    const size_t first = sizes.size() - offsets_.size();
    if (first == 1) {
      memory->padding.assign(sizes[0], 0.0f);
      cut->Add(memory->padding.data(), sizes[0]);
    }
    for (size_t i = 0; i < offsets_.size(); ++i, ++*variable) {
      const int64_t offset = offsets_[i], size = sizes[first + i];
      tensorflow::Var* const var = (*variable)->get();
      tensorflow::Tensor* const tensor = var->tensor();
      if (!var->is_initialized || tensor->dtype() != tensorflow::DT_FLOAT ||
          offset < 0 || offset > tensor->NumElements() - size) {
        return Invalid("A variable must be initialized, float32 and hold elements ",
                       offset, " to ", offset + size,
                       ". Received: ", tensor->DebugString(0));
      }
      if (var->copy_on_read_mode.load() || !tensor->RefCountIsOne()) {
        // Another op still reads the current value.
        tensorflow::Tensor copy;
        TF_RETURN_IF_ERROR(
            context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
        if (tensor->NumElements() > 0) {
          memcpy(copy.data(), tensor->data(), tensor->NumElements() * sizeof(float));
        }
        *tensor = copy;
      }
      cut->Add(static_cast<float*>(tensor->data()) + offset, size);
    }
    return absl::OkStatus();
  }

  UpdateRule rule_ = UpdateRule::kSgd;
  int num_coefficients_ = 1, num_slots_ = 0;
  std::vector<int64_t> offsets_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_UPDATES_H_
