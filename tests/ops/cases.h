// Test cases for the kernels, and the comparison of two devices that run them.
//
// A device is anything that can be called with a struct of kernels.h whose pointers are
// to host memory, and that has filled the outputs when it returns:
//
//   struct Device {
//     template <typename Kernel> void operator()(const Kernel& args);
//   };
//
//   Comparison<DeviceA, DeviceB> comparison(a, b);
//   for (const Shape& shape : Shapes(most)) comparison.Run(shape);
//   puts(comparison.report().c_str());
//
// Buffers are exactly as long as kernels.h says and aligned to their element only, so
// that sanitizers find accesses beyond the end of a buffer, and accesses that need more
// alignment.

#ifndef TFGRADCOMP_TESTS_OPS_CASES_H_
#define TFGRADCOMP_TESTS_OPS_CASES_H_

#include "kernel_cases/calls.h"
#include "kernel_cases/comparison.h"
#include "kernel_cases/cut.h"
#include "kernel_cases/inputs.h"

#endif  // TFGRADCOMP_TESTS_OPS_CASES_H_
