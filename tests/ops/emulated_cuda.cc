// What a test in Python sets of the emulator.

#include <cuda_runtime.h>

extern "C" void tfgradcomp_emulate(bool reverse_order, unsigned most_thread_blocks) {
  cuda_emulator::reverse_order = reverse_order;
  cuda_emulator::most_thread_blocks = most_thread_blocks;
}
