// Runs the CPU kernels of one instruction set over all cases and compares them with the
// portable ones in one piece: built with sanitizers, so that an access outside a buffer
// or undefined behaviour ends it.
//
//   sanitize avx512 10000     instruction set, most elements of a case
//
// Ends with 0: equal, 1: not, 77: this machine has not got the instruction set.

#include <cstdio>
#include <cstdlib>
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

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  if (!tfgradcomp::SetInstructionSet(argv[1])) return 77;
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
