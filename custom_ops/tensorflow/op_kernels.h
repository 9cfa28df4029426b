// All kernels of the ops, and their registration for a device.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_KERNELS_H_

#include "blocks_kernels.h"
#include "chunks_kernels.h"
#include "codes_kernels.h"
#include "error_feedback_kernels.h"
#include "levels_kernels.h"
#include "low_rank_kernels.h"
#include "pairs_kernels.h"
#include "residuals_kernels.h"
#include "signs_kernels.h"
#include "sparse_kernels.h"
#include "votes_kernels.h"

#define TFGRADCOMP_REGISTER_KERNEL(Kernel, DEVICE, OnDevice)          \
  REGISTER_KERNEL_BUILDER(Name("Tfgradcomp>" #Kernel).Device(DEVICE), \
                          Kernel##Op<OnDevice>)

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_KERNELS_H_
