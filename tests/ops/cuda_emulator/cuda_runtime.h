// Runs kernels of CUDA on a CPU, so that their logic can be tested where no GPU is. Found
// before CUDA's own header, it makes a .cu file plain C++ for `g++ -x c++`.
//
// Threads of a thread block are fibers of one thread. A fiber runs until its warp has to
// meet (__syncwarp, a ballot, a shuffle), then the next one does: a forgotten meeting
// shows as a wrong result, and for certain in one of the two orders of fibers and thread
// blocks, so tests run both (`ReverseOrder`). Thread blocks run one after the other.
//
// It has what the kernels here use and no more: thread blocks of whole warps in one
// dimension, meetings of all lanes, no barriers of thread blocks, no device memory.

#ifndef TFGRADCOMP_TESTS_OPS_CUDA_EMULATOR_CUDA_RUNTIME_H_
#define TFGRADCOMP_TESTS_OPS_CUDA_EMULATOR_CUDA_RUNTIME_H_

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(threads)

struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

// -- Threads ----------------------------------------------------------------------

namespace cuda_emulator {

constexpr unsigned kWarpSize = 32;

// Kernels must do with any number of thread blocks. With few, their loops take turns.
constexpr unsigned kMostThreadBlocks = 3;

inline bool reverse_order = false;
inline void ReverseOrder(bool reverse) { reverse_order = reverse; }

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
      : body_(body),
        fibers_(threads),
        warps_(threads / kWarpSize),
        left_(threads) {
    current = this;
    Switch(&caller_, reverse_order ? threads - 1 : 0);
  }

  // Leaves `value` with the warp, waits for all lanes and returns what they left.
  const uint64_t* Meet(uint64_t value) {
    Warp& warp = warps_[threadIdx.x / kWarpSize];
    const uint64_t meeting = warp.meetings;
    uint64_t* values = warp.values[meeting % 2];
    values[threadIdx.x % kWarpSize] = value;
    if (++warp.arrived == kWarpSize) {
      warp.arrived = 0;
      ++warp.meetings;
    }
    while (warp.meetings == meeting) Yield();
    return values;
  }

  static inline ThreadBlock* current;

 private:
  static constexpr size_t kStackBytes = 1 << 16;

  struct Fiber {
    enum { kNew, kRunning, kDone } state = kNew;
    jmp_buf jump;
  };

  static char* StackOf(size_t index) {
    static std::vector<std::unique_ptr<char[]>> stacks;
    while (stacks.size() <= index) stacks.emplace_back(new char[kStackBytes]);
    return stacks[index].get();
  }

  static void RunFiber() {
    current->body_();
    current->fibers_[threadIdx.x].state = Fiber::kDone;
    if (--current->left_ == 0) _longjmp(current->caller_, 1);
    current->Yield();
  }

  void Yield() {
    const unsigned self = threadIdx.x, threads = fibers_.size();
    const unsigned step = reverse_order ? threads - 1 : 1;
    unsigned next = self;
    do {
      next = (next + step) % threads;
    } while (fibers_[next].state == Fiber::kDone);
    if (next != self) Switch(&fibers_[self].jump, next);
  }

  // Jumps save no signal mask, as contexts do by a call of the system at every switch;
  // a context only starts a fiber.
  [[gnu::noinline]] void Switch(jmp_buf* from, unsigned next) {
    threadIdx.x = next;
    if (_setjmp(*from) != 0) return;
    Fiber& fiber = fibers_[next];
    if (fiber.state == Fiber::kRunning) _longjmp(fiber.jump, 1);
    fiber.state = Fiber::kRunning;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = StackOf(next);
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &RunFiber, 0);
    setcontext(&context);
  }

  const std::function<void()>& body_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  unsigned left_;
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

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* votes = cuda_emulator::ThreadBlock::current->Meet(vote);
  unsigned ballot = 0;
  for (unsigned i = 0; i < cuda_emulator::kWarpSize; ++i) ballot |= votes[i] << i;
  return ballot;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask) {
  using namespace cuda_emulator;
  const uint64_t* values = ThreadBlock::current->Meet(ToBits(value));
  return FromBits<T>(values[threadIdx.x % kWarpSize ^ lane_mask]);
}

// -- Arithmetic -------------------------------------------------------------------

inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline float __uint_as_float(unsigned a) { return cuda_emulator::FromBits<float>(a); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

// -- The runtime ------------------------------------------------------------------

enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

using cudaStream_t = struct CUstream_st*;

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
  gridDim = std::min(config->gridDim.x, kMostThreadBlocks);
  blockDim = config->blockDim;
  for (unsigned i = 0; i < gridDim.x; ++i) {
    blockIdx = reverse_order ? gridDim.x - 1 - i : i;
    ThreadBlock(blockDim.x, body);
  }
  return cudaSuccess;
}

#endif  // TFGRADCOMP_TESTS_OPS_CUDA_EMULATOR_CUDA_RUNTIME_H_
