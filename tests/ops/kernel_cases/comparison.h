// The comparison of two devices that run the kernels.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_COMPARISON_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_COMPARISON_H_

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "calls.h"

namespace tfgradcomp_cases {

// Gives a kernel outputs and scratch of its own.
class OwnOutputs {
 public:
  // Fills them with a pattern that no kernel writes everywhere.
  explicit OwnOutputs(unsigned char pattern) : pattern_(pattern) {}

  template <typename T>
  void Input(const T*&, int64_t) {}

  template <typename T>
  void Scratch(T*& field, int64_t count) {
    auto array = std::make_shared<Array<T>>(count);
    field = array->data();
    std::memset(static_cast<void*>(field), pattern_, count * sizeof(T));
    owned_.push_back(std::move(array));
  }

  template <typename T>
  void Output(T*& field, int64_t count) {
    Scratch(field, count);
  }
  template <typename T>
  void Some(T*& field, int64_t most, const int64_t*) {
    Scratch(field, most);
  }

 private:
  unsigned char pattern_;
  std::vector<std::shared_ptr<void>> owned_;
};

// Lists a kernel's outputs.
class ListOutputs {
 public:
  struct Item {
    const void* data;
    int64_t count;
    enum { kWord, kCount, kFloat, kDouble, kByte, kHalf } type;
  };

  template <typename T>
  void Input(const T*&, int64_t) {}
  template <typename T>
  void Scratch(T*&, int64_t) {}
  template <typename T>
  void Output(T*& field, int64_t count) {
    items.push_back({field, count,
                     std::is_same<T, double>::value     ? Item::kDouble
                     : std::is_same<T, float>::value    ? Item::kFloat
                     : std::is_same<T, int64_t>::value  ? Item::kCount
                     : std::is_same<T, int8_t>::value   ? Item::kByte
                     : std::is_same<T, uint16_t>::value ? Item::kHalf
                                                        : Item::kWord});
  }
  template <typename T>
  void Some(T*& field, int64_t, const int64_t* count) {
    Output(field, *count);
  }

  std::vector<Item> items;
};

// Returns the first element in which two arrays differ, or -1. A NaN equals any NaN,
// because it depends on the processor which NaN arithmetic gives.
template <typename T>
int64_t FirstDifference(const void* first, const void* second, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, static_cast<const char*>(first) + i * sizeof(T), sizeof(T));
    std::memcpy(&b, static_cast<const char*>(second) + i * sizeof(T), sizeof(T));
    if (std::memcmp(&a, &b, sizeof(T)) != 0 && !(a != a && b != b)) return i;
  }
  return -1;
}

template <typename First, typename Second>
class Comparison {
 public:
  Comparison(First& first, Second& second) : first_(first), second_(second) {}

  // Runs all calls of a shape on both devices. For odd numbers of workers, some inputs
  // are not finite.
  void Run(const Shape& shape) {
    Inputs inputs(shape, 1 + shape.size + shape.num_workers,
                  shape.num_workers % 2 != 0 ? Values::kAll : Values::kFinite);
    ForEachCall(inputs, shape.layout == Layout::kOneBlock,
                [&](const std::string& name, const auto& args) {
                  try {
                    Compare(name, shape, args);
                  } catch (const std::exception& error) {
                    throw std::runtime_error(Of(name, shape) + ": " + error.what());
                  }
                });
  }

  int64_t calls() const { return calls_; }
  int64_t differences() const { return differences_; }

  // One line for each of the first differences.
  const std::string& report() const { return report_; }

 private:
  template <typename Kernel>
  void Compare(const std::string& name, const Shape& shape, const Kernel& args) {
    Kernel first = args, second = args;
    OwnOutputs first_outputs(0xA5), second_outputs(0x5A);
    VisitBuffers(first, first_outputs);
    VisitBuffers(second, second_outputs);
    first_(first);
    second_(second);
    ++calls_;
    ListOutputs a, b;
    VisitBuffers(first, a);
    VisitBuffers(second, b);
    for (size_t i = 0; i < a.items.size(); ++i) {
      const ListOutputs::Item &x = a.items[i], &y = b.items[i];
      if (x.count != y.count) break;  // An output before says how many, and differs.
      const int64_t at = x.type == ListOutputs::Item::kDouble
                             ? FirstDifference<double>(x.data, y.data, x.count)
                         : x.type == ListOutputs::Item::kFloat
                             ? FirstDifference<float>(x.data, y.data, x.count)
                         : x.type == ListOutputs::Item::kCount
                             ? FirstDifference<int64_t>(x.data, y.data, x.count)
                         : x.type == ListOutputs::Item::kByte
                             ? FirstDifference<int8_t>(x.data, y.data, x.count)
                         : x.type == ListOutputs::Item::kHalf
                             ? FirstDifference<uint16_t>(x.data, y.data, x.count)
                             : FirstDifference<uint32_t>(x.data, y.data, x.count);
      if (at < 0) continue;
      if (++differences_ > 50) continue;
      report_ += Of(name, shape) + ": output " + std::to_string(i) + " differs at " +
                 std::to_string(at) + " of " + std::to_string(x.count) + "\n";
    }
  }

  static std::string Of(const std::string& name, const Shape& shape) {
    return name + ", " + std::to_string(shape.size) + " elements, " +
           kLayoutNames[static_cast<int>(shape.layout)] + ", " +
           std::to_string(shape.num_workers) + " workers";
  }

  First& first_;
  Second& second_;
  int64_t calls_ = 0, differences_ = 0;
  std::string report_;
};

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_COMPARISON_H_
