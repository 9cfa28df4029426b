// The names of the kernels, for code that is the same for each of them.

#ifndef TFGRADCOMP_CUSTOM_OPS_KERNEL_LIST_H_
#define TFGRADCOMP_CUSTOM_OPS_KERNEL_LIST_H_

// All kernels: X(PackCodes) X(UnpackCodes) ...
#define TFGRADCOMP_FOR_EACH_KERNEL(X) \
  X(PackCodes)                        \
  X(UnpackCodes)                      \
  X(PackSigns)                        \
  X(PackMomentumSigns)                \
  X(PackTernary)                      \
  X(BlockStatistics)                  \
  X(SumCodes)                         \
  X(SumLevels)                        \
  X(MeanOfSigns)                      \
  X(FindLevels)                       \
  X(PackLevels)                       \
  X(MeanOfLevels)                     \
  X(MajorityVote)                     \
  X(SignErrorFeedback)                \
  X(MeanSignErrorFeedback)            \
  X(MeanSignSums)                     \
  X(MeanSignResidual)                 \
  X(PackUnambiguous)                  \
  X(PackOverThreshold)                \
  X(MeanOfSparse)                     \
  X(PackLargest)                      \
  X(MeanOfLargest)                    \
  X(AddScaled)                        \
  X(RoundToBfloat16)                  \
  X(MultiplyMatrices)                 \
  X(MultiplyTransposed)               \
  X(MultiplyFactors)                  \
  X(Orthonormalize)

// Those of a CPU: seven more. They update variables by a vector, find a part or the
// largest elements of it, clear elements, take the mean of few, multiply sums of
// matrices, and subtract products.
#define TFGRADCOMP_FOR_EACH_CPU_KERNEL(X) \
  TFGRADCOMP_FOR_EACH_KERNEL(X)           \
  X(ApplyVector)                          \
  X(FirstNonfinite)                       \
  X(FindLargest)                          \
  X(ClearElements)                        \
  X(MeanOfPairs)                          \
  X(MultiplySum)                          \
  X(SubtractFactors)

// The kernels that decode, and take an `Update`.
#define TFGRADCOMP_FOR_EACH_UPDATING_KERNEL(X) \
  X(SumLevels)                                 \
  X(MeanOfSigns)                               \
  X(MeanOfLevels)                              \
  X(MultiplyFactors)

#endif  // TFGRADCOMP_CUSTOM_OPS_KERNEL_LIST_H_
