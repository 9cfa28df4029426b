// Runs kernels of CUDA on a CPU, so that their logic can be tested where no GPU is.
// Found before CUDA's own header, it makes a .cu file plain C++ for `g++ -x c++`.
//
// Threads of a thread block are fibers of one thread. A fiber runs until its warp or
// its thread block has to meet (__syncwarp, a ballot, a shuffle; __syncthreads), then
// the next one does that waits for nobody: a forgotten meeting shows as a wrong result,
// and for certain in one of the two orders of fibers and thread blocks, so tests run
// both (`reverse_order`). Thread blocks run one after the other.
//
// It has what the kernels and their test program use and no more: thread blocks of
// whole warps in one dimension, meetings of all lanes or all threads, one device, whose
// memory is the host's.

#ifndef TFGRADCOMP_TESTS_OPS_CUDA_EMULATOR_CUDA_RUNTIME_H_
#define TFGRADCOMP_TESTS_OPS_CUDA_EMULATOR_CUDA_RUNTIME_H_

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

// -- Threads ----------------------------------------------------------------------

namespace cuda_emulator {

constexpr unsigned kWarpSize = 32;

inline bool reverse_order = false;

// Kernels must do with any number of thread blocks. With few, their loops take turns.
inline unsigned most_thread_blocks = 1;

// The values of a warp's lanes at a meeting. A lane can be ahead of another by one
// meeting, hence two of them.
struct Warp {
  unsigned arrived = 0;
  uint64_t meetings = 0;
  uint64_t values[2][kWarpSize];
};

class ThreadBlock {
 public:
  ThreadBlock(unsigned threads, const std::function<void()>& body)
      : body_(body), waits_(threads), warps_(threads / kWarpSize), left_(threads) {
    while (fibers.size() < threads) fibers.emplace_back(new Fiber);
    current = this;
    Switch(&caller_, reverse_order ? threads - 1 : 0);
  }

  // Leaves `value` with the warp, waits for all lanes and returns what they left.
  const uint64_t* Meet(uint64_t value) {
    Warp& warp = warps_[threadIdx.x / kWarpSize];
    const uint64_t meeting = warp.meetings;
    uint64_t* values = warp.values[meeting % 2];
    values[threadIdx.x % kWarpSize] = value;
    Arrive(&warp.arrived, kWarpSize, &warp.meetings);
    return values;
  }

  // Waits for all threads.
  void MeetAll() { Arrive(&arrived_, waits_.size(), &meetings_); }

  static inline ThreadBlock* current;

 private:
  // Fibers are kept from one thread block to the next: to start one is slow.
  struct Fiber {
    bool started = false;
    jmp_buf jump;
    char stack[1 << 16];
  };
  static inline std::vector<std::unique_ptr<Fiber>> fibers;

  // A fiber waits until a count of meetings is another one.
  struct Wait {
    const uint64_t* meetings = nullptr;
    uint64_t before = 0;

    bool IsOver() const { return meetings == nullptr || *meetings != before; }
  };
  static constexpr uint64_t kNever = 0;

  // The last of `all` to arrive counts the meeting; the others wait for that.
  void Arrive(unsigned* arrived, unsigned all, uint64_t* meetings) {
    waits_[threadIdx.x] = {meetings, *meetings};
    if (++*arrived == all) {
      *arrived = 0;
      ++*meetings;
    } else {
      Yield();
    }
  }

  static void RunFiber() {
    for (;;) {
      current->body_();
      current->waits_[threadIdx.x] = {&kNever, kNever};
      --current->left_;
      current->Yield();  // Until there is another thread block.
    }
  }

  void Yield() {
    const unsigned self = threadIdx.x, last = waits_.size() - 1;
    if (left_ == 0) {
      if (_setjmp(fibers[self]->jump) == 0) _longjmp(caller_, 1);
      return;
    }
    unsigned next = self;
    do {
      if (reverse_order) {
        next = next == 0 ? last : next - 1;
      } else {
        next = next == last ? 0 : next + 1;
      }
    } while (!waits_[next].IsOver());
    Switch(&fibers[self]->jump, next);
  }

  // Jumps save no signal mask, as contexts do by a call of the system at every switch;
  // a context only starts a fiber.
  [[gnu::noinline]] static void Switch(jmp_buf* from, unsigned next) {
    threadIdx.x = next;
    if (_setjmp(*from) != 0) return;
    Fiber& fiber = *fibers[next];
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = sizeof(fiber.stack);
    context.uc_link = nullptr;
    makecontext(&context, &RunFiber, 0);
    setcontext(&context);
  }

  const std::function<void()>& body_;
  std::vector<Wait> waits_;
  std::vector<Warp> warps_;
  unsigned left_;
  unsigned arrived_ = 0;
  uint64_t meetings_ = 0;
  jmp_buf caller_;
};

template <typename T>
uint64_t ToBits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

template <typename T>
T FromBits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace cuda_emulator

inline void __syncwarp() { cuda_emulator::ThreadBlock::current->Meet(0); }

inline void __syncthreads() { cuda_emulator::ThreadBlock::current->MeetAll(); }

inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* votes = cuda_emulator::ThreadBlock::current->Meet(vote);
  unsigned ballot = 0;
  for (unsigned i = 0; i < cuda_emulator::kWarpSize; ++i) ballot |= votes[i] << i;
  return ballot;
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  using namespace cuda_emulator;
  return FromBits<T>(ThreadBlock::current->Meet(ToBits(value))[lane]);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask) {
  using namespace cuda_emulator;
  const uint64_t* values = ThreadBlock::current->Meet(ToBits(value));
  return FromBits<T>(values[threadIdx.x % kWarpSize ^ lane_mask]);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  using namespace cuda_emulator;
  const uint64_t* values = ThreadBlock::current->Meet(ToBits(value));
  const unsigned lane = threadIdx.x % kWarpSize;
  return FromBits<T>(values[lane < delta ? lane : lane - delta]);
}

// One thread runs at a time.
template <typename T>
T atomicAdd(T* target, T value) {
  const T before = *target;
  *target += value;
  return before;
}

template <typename T>
T atomicOr(T* target, T value) {
  const T before = *target;
  *target |= value;
  return before;
}

template <typename T>
T atomicMax(T* target, T value) {
  const T before = *target;
  *target = std::max(before, value);
  return before;
}

// -- Arithmetic -------------------------------------------------------------------

inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return ((uint64_t{high} << 32 | low) << shift % 32) >> 32;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= (bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  }
  return picked;
}
inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(a); }
inline int __float2int_rn(float a) {
  return std::isnan(a) ? 0 : static_cast<int>(std::nearbyint(a));
}
inline float __uint_as_float(unsigned a) { return cuda_emulator::FromBits<float>(a); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }

// -- The runtime ------------------------------------------------------------------

enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice
};
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
};
struct cudaDeviceProp {
  const char* name;
};
using cudaEvent_t = CUevent_st*;
using cudaStream_t = struct CUstream_st*;

// Whatever is asked of the device is done when the call returns. Memory ends where a
// page ends, and the page behind it may not be touched: to read behind it ends the
// process.
namespace cuda_emulator {

constexpr size_t kPage = 4096;
inline std::map<void*, std::pair<void*, size_t>> allocated;

}  // namespace cuda_emulator

inline cudaError_t cudaMalloc(void** memory, size_t size) {
  using namespace cuda_emulator;
  const size_t pages = (size + kPage - 1) / kPage * kPage;
  char* const begin =
      static_cast<char*>(mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(begin + pages, kPage, PROT_NONE);
  *memory = begin + pages - size;
  allocated[*memory] = {begin, pages + kPage};
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  using namespace cuda_emulator;
  const auto found = allocated.find(memory);
  if (found == allocated.end()) return cudaSuccess;
  munmap(found->second.first, found->second.second);
  allocated.erase(found);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
constexpr unsigned cudaStreamNonBlocking = 1;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemset(void* memory, int value, size_t size) {
  std::memset(memory, value, size);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size,
                                   cudaMemcpyKind kind, cudaStream_t = nullptr) {
  return cudaMemcpy(to, from, size, kind);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t size,
                                   cudaStream_t = nullptr) {
  return cudaMemset(memory, value, size);
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin,
                                        cudaEvent_t end) {
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
constexpr int CUDART_VERSION = 12080;
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  properties->name = "emulator";
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using namespace cuda_emulator;
  const std::function<void()> body = [&] { kernel(arguments...); };
  gridDim = std::min(config->gridDim.x, most_thread_blocks);
  blockDim = config->blockDim;
  for (unsigned i = 0; i < gridDim.x; ++i) {
    blockIdx = reverse_order ? gridDim.x - 1 - i : i;
    ThreadBlock(blockDim.x, body);
  }
  return cudaSuccess;
}

#endif  // TFGRADCOMP_TESTS_OPS_CUDA_EMULATOR_CUDA_RUNTIME_H_
