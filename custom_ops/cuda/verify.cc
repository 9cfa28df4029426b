// Checks the kernels against those of the CPU on a GPU, and measures them. Needs no
// TensorFlow; a shared library for ctypes (tests/ops/test_cuda.py).

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../tests/ops/cases.h"
#include "../cpu/cpu.h"
#include "cuda.h"

namespace {

using namespace tfgradcomp_cases;  // NOLINT

void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void Check(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

// Copies of a kernel's arrays on the GPU, with memory around them that must stay as it
// is. Arrays begin `offset` elements after an aligned address.
class DeviceBuffers {
 public:
  explicit DeviceBuffers(int offset) : offset_(offset) {}
  DeviceBuffers(const DeviceBuffers&) = delete;
  DeviceBuffers& operator=(const DeviceBuffers&) = delete;
  ~DeviceBuffers() {
    for (const Buffer& buffer : buffers_) cudaFree(buffer.memory);
  }

  template <typename T>
  void Input(const T*& field, int64_t count) {
    T* copy = Allocate(const_cast<T*>(field), count, false);
    Check(cudaMemcpy(copy, field, count * sizeof(T), cudaMemcpyHostToDevice));
    field = copy;
    bytes += count * sizeof(T);
  }

  template <typename T>
  void Scratch(T*& field, int64_t count) {
    field = Allocate(field, count, false);
  }

  template <typename T>
  void Output(T*& field, int64_t count) {
    field = Allocate(field, count, true);
    bytes += count * sizeof(T);
  }

  template <typename T>
  void Some(T*& field, int64_t most, const int64_t*) {
    field = Allocate(field, most, true);
  }

  void CopyOutputs() const {
    for (const Buffer& buffer : buffers_) {
      std::vector<char> copy(buffer.before + buffer.size + kGuard);
      Check(
          cudaMemcpy(copy.data(), buffer.memory, copy.size(), cudaMemcpyDeviceToHost));
      const auto untouched = [](char c) { return c == kPattern; };
      if (!std::all_of(copy.begin(), copy.begin() + buffer.before, untouched) ||
          !std::all_of(copy.end() - kGuard, copy.end(), untouched)) {
        throw std::runtime_error("a kernel wrote outside of an array");
      }
      if (buffer.is_output && buffer.size > 0) {
        std::memcpy(buffer.host, copy.data() + buffer.before, buffer.size);
      }
    }
  }

  int64_t bytes = 0;  // What a kernel has to read and to write.

 private:
  struct Buffer {
    void *host, *memory;
    size_t before, size;
    bool is_output;
  };
  static constexpr size_t kGuard = 256;
  static constexpr char kPattern = 0x5A;

  template <typename T>
  T* Allocate(T* host, int64_t count, bool is_output) {
    const size_t before = offset_ * sizeof(T), size = count * sizeof(T);
    const size_t all = before + size + kGuard;
    void* memory;
    Check(cudaMalloc(&memory, all));
    buffers_.push_back({host, memory, before, size, is_output});
    Check(cudaMemset(memory, kPattern, all));
    return static_cast<T*>(memory) + offset_;
  }

  int offset_;
  std::vector<Buffer> buffers_;
};

struct Cpu {
  template <typename Kernel>
  void operator()(const Kernel& args) {
    Run(Parallel{nullptr, nullptr}, args);
  }
};

struct DeviceGpu {
  template <typename Kernel>
  void operator()(const Kernel& args) {
    Kernel copied = args;
    DeviceBuffers buffers(1);
    VisitBuffers(copied, buffers);
    Check(Run(Gpu{nullptr}, copied));
    Check(cudaDeviceSynchronize());
    buffers.CopyOutputs();
  }
};

// -- Speed ------------------------------------------------------------------------

class Stopwatch {
 public:
  // Memory of `other_bytes` is written before each run, to have its data in no cache.
  explicit Stopwatch(int64_t other_bytes) : other_bytes_(other_bytes) {
    Check(cudaEventCreate(&begin_));
    Check(cudaEventCreate(&end_));
    Check(cudaMalloc(&other_, other_bytes));
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaFree(other_);
  }

  // The median time of `launch` in seconds.
  template <typename Launch>
  double Seconds(const Launch& launch) const {
    std::vector<float> milliseconds(9);
    for (float& time : milliseconds) {
      Check(cudaMemsetAsync(other_, 0, other_bytes_));
      Check(cudaEventRecord(begin_));
      launch();
      Check(cudaEventRecord(end_));
      Check(cudaEventSynchronize(end_));
      Check(cudaEventElapsedTime(&time, begin_, end_));
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds[milliseconds.size() / 2] / 1e3;
  }

 private:
  int64_t other_bytes_;
  cudaEvent_t begin_, end_;
  void* other_;
};

// Bytes read and written a second.
double CopyBandwidth(const Stopwatch& stopwatch, int64_t bytes) {
  void *from, *to;
  Check(cudaMalloc(&from, bytes));
  Check(cudaMalloc(&to, bytes));
  const double seconds = stopwatch.Seconds(
      [&] { Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice)); });
  Check(cudaFree(from));
  Check(cudaFree(to));
  return 2 * bytes / seconds;
}

std::string Measure(int64_t size) {
  int device;
  cudaDeviceProp properties;
  Check(cudaGetDevice(&device));
  Check(cudaGetDeviceProperties(&properties, device));
  const int64_t large = 16 * size;  // From 2^24 elements on, more than caches hold.
  const Stopwatch stopwatch(large);
  const double copy = CopyBandwidth(stopwatch, large);
  std::string csv = "device,call,blocks,elements,microseconds,GB/s,of copy\n";
  for (const Layout layout : {Layout::kOneBlock, Layout::kBuckets}) {
    Inputs inputs(Shape{size, layout, 4}, 1, false);
    ForEachCall(inputs, layout == Layout::kOneBlock,
                [&](const std::string& name, auto args) {
                  DeviceBuffers buffers(0);
                  OwnOutputs outputs(0);
                  VisitBuffers(args, outputs);
                  VisitBuffers(args, buffers);
                  const double seconds =
                      stopwatch.Seconds([&] { Check(Run(Gpu{nullptr}, args)); });
                  const double speed = buffers.bytes / seconds;
                  char numbers[512];
                  std::snprintf(numbers, sizeof(numbers), "%lld,%.1f,%.1f,%.3f\n",
                                static_cast<long long>(size), seconds * 1e6,
                                speed / 1e9, speed / copy);
                  csv += std::string(properties.name) + "," + name + "," +
                         kLayoutNames[static_cast<int>(layout)] + "," + numbers;
                });
  }
  return csv;
}

// Gives `work`'s text, or the error's, to a caller in C.
template <typename Work>
bool Report(char* report, int64_t length, const Work& work) {
  std::string text;
  bool good = true;
  try {
    good = work(&text);
  } catch (const std::exception& error) {
    text += error.what();
    good = false;
  }
  std::snprintf(report, length, "%s", text.c_str());
  return good;
}

}  // namespace

extern "C" {

int tfgradcomp_gpu_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Compares all kernels on shapes of at most `most` elements. Returns whether GPU and
// CPU agree to the bit; `report` tells where they do not.
bool tfgradcomp_verify(int64_t most, char* report, int64_t length) {
  return Report(report, length, [most](std::string* text) {
    Cpu cpu;
    DeviceGpu gpu;
    Comparison<Cpu, DeviceGpu> comparison(cpu, gpu);
    for (const Shape& shape : Shapes(most)) comparison.Run(shape);
    *text = std::to_string(comparison.calls()) + " calls, " +
            std::to_string(comparison.differences()) + " differences\n" +
            comparison.report();
    return comparison.calls() > 0 && comparison.differences() == 0;
  });
}

// Writes lines of CSV: the speed of each call on `size` elements.
bool tfgradcomp_measure(int64_t size, char* report, int64_t length) {
  return Report(report, length, [size](std::string* text) {
    *text = Measure(size);
    return true;
  });
}
}
