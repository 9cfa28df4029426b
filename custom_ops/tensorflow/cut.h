// The arrays of a vector that is cut into parts.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CUT_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CUT_H_

#include <cstdint>
#include <vector>

#include "../kernels.h"

namespace tfgradcomp {

struct Cut {
  std::vector<float*> parts;
  std::vector<int64_t> splits = {0};

  void Add(float* part, int64_t size) {
    parts.push_back(part);
    splits.push_back(splits.back() + size);
  }
};

// Sets `vector` to the parts of `cut`.
template <typename T>
void SetParts(const Cut& cut, CutVector<T>* vector) {
  vector->num_parts = static_cast<int64_t>(cut.parts.size());
  if (vector->num_parts == 1) {
    vector->whole = cut.parts[0];
  } else {
    vector->parts = cut.parts.data();
    vector->splits = cut.splits.data();
  }
}

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_CUT_H_
