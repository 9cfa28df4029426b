// Memory of a method's state on the host, kept from step to step.
//
// A step writes new momenta and residuals beside the old ones, and sums that are as
// large, which are freed after the step. The system takes back such large blocks and
// gives out new blocks page by page, which costs more than all arithmetic of a step.
// Here a freed block waits for the next step instead. At most twice as many bytes wait
// as are in use: a step of top-k takes three vectors beside a state of one.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_KEPT_MEMORY_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_KEPT_MEMORY_H_

#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "tensorflow/core/framework/allocator.h"

namespace tfgradcomp {

// Smaller blocks come from the C library, which does not give them back at once.
constexpr size_t kKeptBytes = size_t{1} << 20;

class KeptMemory : public tensorflow::Allocator {
 public:
  // There is one object for the process. It is never destroyed.
  static KeptMemory* Get() {
    static KeptMemory* const memory = new KeptMemory;
    return memory;
  }

  std::string Name() override { return "tfgradcomp_kept_memory"; }

  void* AllocateRaw(size_t alignment, size_t size) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    void* block = Take(size);
    if (block == nullptr)
      block = tensorflow::cpu_allocator()->AllocateRaw(alignment, size);
    if (block == nullptr) return nullptr;
    sizes_[block] = size;
    used_ += size;
    return block;
  }

  void DeallocateRaw(void* block) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(block);
    used_ -= found->second;
    waiting_ += found->second;
    blocks_.emplace_back(block, found->second);
    sizes_.erase(found);
    while (waiting_ > 2 * used_) {
      waiting_ -= blocks_.front().second;
      tensorflow::cpu_allocator()->DeallocateRaw(blocks_.front().first);
      blocks_.pop_front();
    }
  }

 private:
  // Returns a waiting block of this size, or null. All steps ask for the same sizes.
  void* Take(size_t size) {
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
      if (block->second != size) continue;
      void* taken = block->first;
      waiting_ -= size;
      blocks_.erase(block);
      return taken;
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  // The blocks that wait, the longest waiting first.
  std::deque<std::pair<void*, size_t>> blocks_;
  size_t used_ = 0, waiting_ = 0;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_KEPT_MEMORY_H_
