// Checks the kernels against those of the CPU on a GPU, and measures them. Needs no
// TensorFlow; a shared library for ctypes (tests/ops/cuda_library.py). Not a .cu file:
// those are parts of the library that is installed.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../tests/ops/cases.h"
#include "../cpu/cpu.h"
#include "cuda.h"
#include "warp.h"

namespace tfgradcomp {
namespace {

// Reads all and writes nothing.
__global__ void __launch_bounds__(kThreads)
    ReadKernel(const uint32_t* words, int64_t count, uint32_t* never) {
  uint32_t all = 0;
  for (int64_t tile = FirstTile(); tile * kWarp < count; tile += TileStride()) {
    const int64_t word = tile * kWarp + Lane();
    if (word < count) all |= words[word];
  }
  if (all != 0) *never = all;
}

}  // namespace
}  // namespace tfgradcomp

namespace {

using namespace tfgradcomp_cases;  // NOLINT

void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void Check(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

// A stream that does not synchronize with the null stream: work that a kernel puts on
// the null stream by mistake runs before its inputs are there.
class Stream {
 public:
  Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }

  operator cudaStream_t() const { return stream_; }  // NOLINT: it is one.

 private:
  cudaStream_t stream_;
};

// Device memory.
class Memory {
 public:
  explicit Memory(size_t size) : size(size) {
    Check(cudaMalloc(&memory_, std::max(size, size_t{1})));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory(Memory&& other) : size(other.size), memory_(other.memory_) {
    other.memory_ = nullptr;
  }
  ~Memory() { cudaFree(memory_); }

  char* data() const { return static_cast<char*>(memory_); }

  const size_t size;

 private:
  void* memory_;
};

// The layout of a kernel's arrays in the memory of the GPU.
struct Placing {
  int offset;    // Elements between an aligned address and an array's first one.
  size_t guard;  // Bytes behind an array that must not change.
};

// Copies of a kernel's arrays on the GPU, with memory around them that must not change.
// Inputs wait in separate memory until `Fill`.
class DeviceBuffers {
 public:
  DeviceBuffers(const Placing& placing, cudaStream_t stream)
      : placing_(placing), stream_(stream) {}

  template <typename T>
  void Input(const T*& field, int64_t count) {
    const size_t size = count * sizeof(T);
    Memory waiting(size);
    Check(
        cudaMemcpyAsync(waiting.data(), field, size, cudaMemcpyHostToDevice, stream_));
    field = Allocate(const_cast<T*>(field), count, false);
    inputs_.push_back({buffers_.size() - 1, std::move(waiting)});
    bytes += size;
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

  // Fills on the stream: memory that is no input gets a pattern.
  void Fill() const {
    for (const Buffer& buffer : buffers_) {
      const Memory& memory = buffer.memory;
      Check(cudaMemsetAsync(memory.data(), kPattern, memory.size, stream_));
    }
    for (const auto& [index, waiting] : inputs_) {
      const Buffer& buffer = buffers_[index];
      Check(cudaMemcpyAsync(buffer.memory.data() + buffer.before, waiting.data(),
                            buffer.size, cudaMemcpyDeviceToDevice, stream_));
    }
  }

  void CopyOutputs() const {
    for (const Buffer& buffer : buffers_) {
      std::vector<char> copy(buffer.memory.size);
      Check(cudaMemcpyAsync(copy.data(), buffer.memory.data(), copy.size(),
                            cudaMemcpyDeviceToHost, stream_));
      Check(cudaStreamSynchronize(stream_));
      const auto untouched = [](char c) { return c == kPattern; };
      const auto begin = copy.begin() + buffer.before, end = begin + buffer.size;
      if (!std::all_of(copy.begin(), begin, untouched) ||
          !std::all_of(end, copy.end(), untouched)) {
        throw std::runtime_error("a kernel wrote outside of an array");
      }
      if (buffer.is_output && buffer.size > 0) {
        std::memcpy(buffer.host, copy.data() + buffer.before, buffer.size);
      }
    }
  }

  int64_t bytes = 0;  // The bytes that a kernel has to read and to write.

 private:
  struct Buffer {
    void* host;
    Memory memory;
    size_t before, size;
    bool is_output;
  };
  struct Waiting {
    size_t index;
    Memory memory;
  };
  static constexpr char kPattern = 0x5A;

  template <typename T>
  T* Allocate(T* host, int64_t count, bool is_output) {
    const size_t before = placing_.offset * sizeof(T), size = count * sizeof(T);
    buffers_.push_back(
        {host, Memory(before + size + placing_.guard), before, size, is_output});
    return reinterpret_cast<T*>(buffers_.back().memory.data() + before);
  }

  Placing placing_;
  cudaStream_t stream_;
  std::vector<Buffer> buffers_;
  std::vector<Waiting> inputs_;
};

struct Cpu {
  template <typename Kernel>
  void operator()(const Kernel& args) {
    Run(Parallel{nullptr, nullptr}, args);
  }
};

// Runs a kernel on a stream that is late by a memset of `delay` bytes.
class DeviceGpu {
 public:
  DeviceGpu(const Placing& placing, int64_t delay) : placing_(placing), delay_(delay) {}

  template <typename Kernel>
  void operator()(const Kernel& args) {
    Kernel copied = args;
    DeviceBuffers buffers(placing_, stream_);
    VisitBuffers(copied, buffers);
    Check(cudaStreamSynchronize(stream_));
    Check(cudaMemsetAsync(delay_.data(), 0, delay_.size, stream_));
    buffers.Fill();
    Check(Run(Gpu{stream_}, copied));
    Check(cudaStreamSynchronize(stream_));
    buffers.CopyOutputs();
  }

 private:
  Stream stream_;
  Placing placing_;
  Memory delay_;
};

// -- Speed ------------------------------------------------------------------------

class Stopwatch {
 public:
  // Memory of `other_bytes` is read before each run, to have its data in no cache.
  // Were it written, the cache would still be writing while the run is measured.
  explicit Stopwatch(int64_t other_bytes) : other_(other_bytes) {
    Check(cudaEventCreate(&begin_));
    Check(cudaEventCreate(&end_));
    Check(cudaMemsetAsync(other_.data(), 0, other_.size, stream));
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  // The median time of `launch` in seconds. The first of the runs does not count.
  template <typename Launch>
  double Seconds(const Launch& launch) const {
    constexpr int kRuns = 11;
    std::vector<float> milliseconds(kRuns);
    uint32_t* const words = reinterpret_cast<uint32_t*>(other_.data());
    const int64_t count = other_.size / sizeof(uint32_t);
    for (int run = -1; run < kRuns; ++run) {
      Check(Read(count, words));
      Check(cudaEventRecord(begin_, stream));
      launch();
      Check(cudaEventRecord(end_, stream));
      Check(cudaEventSynchronize(end_));
      if (run < 0) continue;
      Check(cudaEventElapsedTime(&milliseconds[run], begin_, end_));
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds[kRuns / 2] / 1e3;
  }

  Stream stream;

 private:
  const char* Read(int64_t count, uint32_t* words) const {
    return ::tfgradcomp::Launch(Gpu{stream}, CeilDiv(count, kWarp), ReadKernel,
                                static_cast<const uint32_t*>(words), count, words);
  }

  Memory other_;
  cudaEvent_t begin_, end_;
};

// Bytes read and written a second.
double CopyBandwidth(const Stopwatch& stopwatch, int64_t bytes) {
  const Memory from(bytes), to(bytes);
  const double seconds = stopwatch.Seconds([&] {
    Check(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice,
                          stopwatch.stream));
  });
  return 2 * bytes / seconds;
}

std::string Measure(int64_t size) {
  int device;
  cudaDeviceProp properties;
  Check(cudaGetDevice(&device));
  Check(cudaGetDeviceProperties(&properties, device));
  const Stopwatch stopwatch(16 *
                            size);  // From 2^24 elements on, more than caches hold.
  const double copy = CopyBandwidth(stopwatch, 4 * size);
  std::string csv = "device,call,blocks,elements,microseconds,GB/s,of copy\n";
  for (const Layout layout : {Layout::kOneBlock, Layout::kBuckets}) {
    Inputs inputs(Shape{size, layout, 4}, 1, Values::kLikeGradients);
    ForEachCall(
        inputs, layout == Layout::kOneBlock, [&](const std::string& name, auto args) {
          DeviceBuffers buffers({0, 0}, stopwatch.stream);
          OwnOutputs outputs(0);
          VisitBuffers(args, outputs);
          VisitBuffers(args, buffers);
          buffers.Fill();
          const double seconds =
              stopwatch.Seconds([&] { Check(Run(Gpu{stopwatch.stream}, args)); });
          const double speed = buffers.bytes / seconds;
          char numbers[128];
          std::snprintf(numbers, sizeof(numbers), "%lld,%.1f,%.1f,%.3f\n",
                        static_cast<long long>(size), seconds * 1e6,  // NOLINT
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

// Compares all kernels on shapes of at most `most` elements, or on few shapes, which
// are enough to run every line. Returns whether GPU and CPU agree to the bit; `report`
// tells where they do not. `guard` and `delay`: see Placing and DeviceGpu.
bool tfgradcomp_verify(int64_t most, bool few, int64_t guard, int64_t delay,
                       char* report, int64_t length) {
  return Report(report, length, [=](std::string* text) {
    Cpu cpu;
    DeviceGpu gpu({1, static_cast<size_t>(guard)}, delay);
    Comparison<Cpu, DeviceGpu> comparison(cpu, gpu);
    for (const Shape& shape : few ? FewShapes(most) : Shapes(most)) {
      comparison.Run(shape);
    }
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
