// Runs the CPU kernels of one instruction set over all cases and compares them with the
// portable ones in one piece: built with sanitizers, so that an access outside a buffer
// or undefined behaviour ends it.
//
//   sanitize avx512 10000 pieces     instruction set, most elements of a case
//   sanitize avx512 3000 threads     all in threads that take ranges from a queue, as
//                                    those of TensorFlow's pool do, in two operations
//                                    at a time: for ThreadSanitizer
//
// Ends with 0: equal, 1: not, 77: this machine has not got the instruction set.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../../custom_ops/cpu/cpu.h"
#include "cases.h"

namespace {

// The kernels in `pieces` pieces of odd and very different lengths, empty ones among
// them: what an element becomes must not depend on where a range begins, nor on the
// order of ranges, nor on how the vector is cut.
struct Device {
  const char* instruction_set;
  int pieces;
  bool reverse;
  bool threads;
  bool cut;

  template <typename Kernel>
  void operator()(const Kernel& args) {
    tfgradcomp::SetInstructionSet(instruction_set);
    const tfgradcomp::Parallel in_pieces{RunPieces, this}, in_one{nullptr, nullptr};
    const auto run = [&](const Kernel& given) {
      tfgradcomp::Run(pieces == 0 ? in_one : in_pieces, given);
    };
    if (cut) {
      tfgradcomp_cases::RunCut(args, run);
    } else {
      run(args);
    }
  }

  static void RunPieces(void* pool, int64_t units, int64_t bytes_per_unit,
                        void (*body)(void*, int64_t, int64_t), void* closure) {
    const Device& device = *static_cast<const Device*>(pool);
    if (units < 0 || bytes_per_unit < 0) std::abort();
    std::vector<int64_t> bounds = {0};
    for (int64_t i = 1; i < device.pieces; ++i) {
      bounds.push_back(units * i * i / (device.pieces * device.pieces));
    }
    bounds.push_back(units);
    std::vector<std::thread> threads;
    for (int i = 0; i < device.pieces; ++i) {
      const int piece = device.reverse ? device.pieces - 1 - i : i;
      const int64_t begin = bounds[piece], end = bounds[piece + 1];
      if (begin == end) continue;
      if (device.threads) {
        threads.emplace_back([=] { body(closure, begin, end); });
      } else {
        body(closure, begin, end);
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
};

// The kernels in ranges that four threads take from a queue.
struct Pool {
  static constexpr int kThreads = 4;

  template <typename Kernel>
  void operator()(const Kernel& args) {
    tfgradcomp::Run(tfgradcomp::Parallel{RunInPool, nullptr}, args);
  }

  static void RunInPool(void*, int64_t units, int64_t,
                        void (*body)(void*, int64_t, int64_t), void* closure) {
    const int64_t step = 1 + units / 16;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      // Relaxed, so that taking a range puts nothing that threads do into an order.
      for (;;) {
        const int64_t begin = next.fetch_add(step, std::memory_order_relaxed);
        if (begin >= units) break;
        body(closure, begin, begin + step < units ? begin + step : units);
      }
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < kThreads; ++i) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
  }
};

struct InOnePiece {
  template <typename Kernel>
  void operator()(const Kernel& args) {
    tfgradcomp::Run(tfgradcomp::Parallel{nullptr, nullptr}, args);
  }
};

// Every operation, in a pool of its own, while another thread runs the same ones.
bool RunInThreads(const char* instruction_set, int64_t most) {
  tfgradcomp::SetInstructionSet(instruction_set);
  const auto operations = [most] {
    Pool pool;
    InOnePiece whole;
    auto comparison = tfgradcomp_cases::Comparison<Pool, InOnePiece>(pool, whole);
    size_t turn = 0;
    for (const auto& shape : tfgradcomp_cases::Shapes(most)) {
      if (++turn % 4 == 0) comparison.Run(shape);
    }
    std::printf("%s", (std::to_string(comparison.calls()) + " calls, " +
                       std::to_string(comparison.differences()) + " differences\n" +
                       comparison.report())
                          .c_str());
    return comparison.differences() == 0;
  };
  bool other = false;
  std::thread thread([&] { other = operations(); });
  const bool own = operations();
  thread.join();
  return own && other;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  if (!tfgradcomp::SetInstructionSet(argv[1])) return 77;
  if (std::string(argv[3]) == "threads") {
    return RunInThreads(argv[1], std::atoll(argv[2])) ? 0 : 1;
  }
  Device portable{"portable", 0, false, false, false};
  std::vector<Device> devices;
  for (bool cut : {false, true}) devices.push_back({argv[1], 0, false, false, cut});
  for (int pieces = 1; pieces <= 5; ++pieces) {
    devices.push_back({argv[1], pieces, true, pieces == 4, pieces % 2 == 0});
  }
  bool equal = true;
  size_t turn = 0;
  for (Device& device : devices) {
    tfgradcomp_cases::Comparison<Device, Device> comparison(portable, device);
    for (const auto& shape : tfgradcomp_cases::Shapes(std::atoll(argv[2]))) {
      // Each shape once in one piece, whole or cut, and once in several.
      if (++turn % (device.pieces > 0 ? 5 : 2) != 0) continue;
      comparison.Run(shape);
    }
    if (device.pieces == 0 && !device.cut) turn = 1;
    std::printf(
        "%s, %d pieces%s: %lld calls, %lld differences\n%s", argv[1], device.pieces,
        device.cut ? ", cut" : "", static_cast<long long>(comparison.calls()),
        static_cast<long long>(comparison.differences()), comparison.report().c_str());
    equal = equal && comparison.differences() == 0;
  }
  return equal ? 0 : 1;
}
