// The kernels' arguments and maths, on any device: a struct for each kernel.
//
// The caller fills a struct and gives it to `Run` of a device (cpu/cpu.h, cuda/cuda.h).
// Vectors are flat and contiguous, aligned to their element only. `size` is the number
// d of elements of the float vector. Block b is the range
// [row_splits[b], row_splits[b + 1]) of the vector; row_splits[0] = 0,
// row_splits[num_blocks] = d, and no block is empty. Pointers to scalars and row_splits
// point to the memory of the device, so that no GPU has to wait for them. Arithmetic is
// IEEE float32 in the order written, without contraction to fused multiply-add, unless
// the text states otherwise.
//
// word_format.h states codes, words and the random numbers of a stream.

#ifndef TFGRADCOMP_CUSTOM_OPS_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_KERNELS_H_

#include <cstdint>

#include "kernel_list.h"
#include "low_rank.h"
#include "vectors.h"

namespace tfgradcomp {

// codes[j] in [0, base) -> words. base in [2, 2^32]; codes are read as uint32.
struct PackCodes {
  const int32_t* codes;
  int64_t size;
  uint64_t base;
  uint32_t* words;  // [WordsFor(size, base)]
};

// words -> codes[r, j], for each of `rows` rows of words.
struct UnpackCodes {
  const uint32_t* words;  // [rows, WordsFor(size, base)]
  int64_t rows;
  int64_t size;
  uint64_t base;
  int32_t* codes;  // [rows, size]
};

// Base-2 words of the signs of x: code 1 for plus. An exact zero, +0 or -0, counts as
// plus; if `stream` is given, its code is the element's coin. *nonfinite is the number
// of elements that are infinite or NaN.
struct PackSigns {
  CutVector<const float> x;
  int64_t size;
  const uint64_t* stream;  // {key, high, first} or null
  uint32_t* words;         // [WordsFor(size, 2)]
  int64_t* nonfinite;
};

// new_momentum = beta * momentum + one_minus_beta * x; then the signs of new_momentum,
// or of x if *warming_up, as PackSigns with `stream`. *nonfinite is the number of
// elements of new_momentum that are infinite or NaN. They include all such elements of
// x.
struct PackMomentumSigns {
  CutVector<const float> x;
  const float* momentum;
  int64_t size;
  float beta;
  float one_minus_beta;
  const bool* warming_up;
  const uint64_t* stream;
  float* new_momentum;
  uint32_t* words;  // [WordsFor(size, 2)]
  int64_t* nonfinite;
};

// Base-3 words of sign(x) * kept + 1, where kept is
//   Uniform(stream, j) * scale[b] < min(|x_j|, limit[b]).
struct PackTernary {
  CutVector<const float> x;
  int64_t size;
  const float* limit;  // [num_blocks], +inf: no clipping
  const float* scale;  // [num_blocks]
  const int64_t* row_splits;
  int64_t num_blocks;
  const uint64_t* stream;  // {key, high, first}
  uint32_t* words;         // [WordsFor(size, 3)]
};

// The sum of N vectors of codes, in words of sum_base, which is at least
// N * (base - 1) + 1 and at most 2^32. Sums may be partial: if all have the same base,
// which holds the largest total, adding their words modulo 2^32 adds their digits,
// without a carry.
struct SumCodes {
  const uint32_t* words;  // [num_workers, WordsFor(size, base)]
  int64_t num_workers;
  int64_t size;
  uint64_t base;
  uint64_t sum_base;
  uint32_t* sum;  // [WordsFor(size, sum_base)]
};

// values[j] = scale[b] * float(step * sum_i code_ij - zero). The integer stays below
// 2^31.
struct SumLevels {
  const uint32_t* words;  // [num_workers, WordsFor(size, base)]
  int64_t num_workers;
  int64_t size;
  uint64_t base;
  int64_t step;
  int64_t zero;
  const float* scale;  // [num_blocks]
  const int64_t* row_splits;
  int64_t num_blocks;
  CutVector<float> values;
  const Update* update = nullptr;  // Or null: the values are written.
};

// The mean of N vectors of scaled signs, added in the order of workers:
//   values[j] = (((+-scale[0, b]) +- scale[1, b]) ...) / float(N).
struct MeanOfSigns {
  const uint32_t* words;  // [num_workers, WordsFor(size, 2)]
  const float* scale;     // [num_workers, num_blocks]
  int64_t num_workers;
  int64_t size;
  const int64_t* row_splits;
  int64_t num_blocks;
  CutVector<float> values;
  const Update* update = nullptr;  // Or null: the values are written.
};

// Levels of each block, by a rule of find_levels in tfgradcomp/ops/reference/levels.py.
// That file defines them to the bit; its sums are of integers, exact in any order.
// Blocks with an element that is infinite or NaN have levels 0; *nonfinite counts these
// elements.
enum class LevelRule { kOptimal, kQuantiles, kSymmetric, kMeans };
struct FindLevels {
  CutVector<const float> x;
  int64_t size;
  LevelRule rule;
  int64_t count;
  int64_t sweeps;
  const int64_t* row_splits;
  int64_t num_blocks;
  uint64_t* scratch;  // [LevelsScratch(size)], on a GPU only
  float* levels;      // [num_blocks, count]
  int64_t* nonfinite;
};

// With k the number of levels 1 .. count - 2 of the block that are <= x_j, words of
// base `count` with the codes
//   k + (Uniform(stream, j) * (levels[k + 1] - levels[k]) < x_j - levels[k])
// or, if `stream` is null, words of base `count` - 1 with the codes k.
struct PackLevels {
  CutVector<const float> x;
  int64_t size;
  const float* levels;  // [num_blocks, count]
  int64_t count;
  const int64_t* row_splits;
  int64_t num_blocks;
  const uint64_t* stream;  // {key, high, first} or null
  uint32_t* words;
};

// The mean of N vectors of levels, added in the order of workers:
//   values[j] = ((levels[0, b, code_0j] + levels[1, b, code_1j]) + ...) / float(N).
struct MeanOfLevels {
  const uint32_t* words;  // [num_workers, WordsFor(size, count)]
  const float* levels;    // [num_workers, num_blocks, count]
  int64_t num_workers;
  int64_t size;
  int64_t count;
  const int64_t* row_splits;
  int64_t num_blocks;
  CutVector<float> values;
  const Update* update = nullptr;  // Or null: the values are written.
};

// The vote of N vectors of signs (base 2: code 1 for plus) or of signs and abstentions
// (base 3: codes 0, 1, 2 for minus, none, plus). net is the number of plus signs less
// the number of minus signs; the vote is sign(net). If net is 0 and `stream` is given,
// the element's coin decides (1 for plus). Then, if |net| < quorum and reply_base is 3,
// the vote is 0. The reply's codes are vote + 1 in base 3 and (vote + 1) / 2, rounded
// down, in base 2.
struct MajorityVote {
  const uint32_t* words;  // [num_workers, WordsFor(size, base)]
  int64_t num_workers;
  int64_t size;
  int64_t base;
  int64_t reply_base;
  int64_t quorum;
  const uint64_t* stream;  // {key, high, first} or null
  uint32_t* votes;         // [WordsFor(size, reply_base)]
};

// The worker's step of error feedback with scaled signs:
//   new_momentum = mu * momentum + x          (only if momentum is given)
//   p = mu * new_momentum + x + *ratio * residual      (without momentum: x + ...)
//   scale[b] = float(sum of |p| over the block / its size), a float64 sum
//   words = signs of p, a zero counting as plus
//   new_residual = p - (+-scale[b]), or residual if not *moving.
struct SignErrorFeedback {
  CutVector<const float> x;
  const float* momentum;  // [size] or null
  const float* residual;
  int64_t size;
  float mu;
  const float* ratio;
  const bool* moving;
  const int64_t* row_splits;
  int64_t num_blocks;
  double* scratch;      // [SlotsFor(size, num_blocks)]
  float* new_momentum;  // [size] if momentum is given
  float* new_residual;  // [size]
  float* scale;         // [num_blocks]
  uint32_t* words;      // [WordsFor(size, 2)]
};

// The server's step: SignErrorFeedback without momentum, where x is the MeanOfSigns
// that N workers sent.
struct MeanSignErrorFeedback {
  const uint32_t* sent_words;  // [num_workers, WordsFor(size, 2)]
  const float* sent_scale;     // [num_workers, num_blocks]
  int64_t num_workers;
  const float* residual;
  int64_t size;
  const float* ratio;
  const bool* moving;
  const int64_t* row_splits;
  int64_t num_blocks;
  double* scratch;      // [SlotsFor(size, num_blocks)]
  float* new_residual;  // [size]
  float* scale;         // [num_blocks]
  uint32_t* words;      // [WordsFor(size, 2)]
};

// The first half of MeanSignErrorFeedback, for a server that holds a part of the
// vector: a block's scale is known only after the sums of all its parts have been
// added. With p of MeanSignErrorFeedback,
//   words = signs of p, l1[b] = sum of |p| over the block, a float64 sum.
struct MeanSignSums {
  const uint32_t* sent_words;  // [num_workers, WordsFor(size, 2)]
  const float* sent_scale;     // [num_workers, num_blocks]
  int64_t num_workers;
  const float* residual;
  int64_t size;
  const float* ratio;
  const int64_t* row_splits;
  int64_t num_blocks;
  double* scratch;  // [SlotsFor(size, num_blocks)]
  double* l1;       // [num_blocks]
  uint32_t* words;  // [WordsFor(size, 2)]
};

// The second half: new_residual = p - (+-scale[b]), with the signs of `words`, or
// residual if not *moving.
struct MeanSignResidual {
  const uint32_t* sent_words;  // [num_workers, WordsFor(size, 2)]
  const float* sent_scale;     // [num_workers, num_blocks]
  int64_t num_workers;
  const float* residual;
  int64_t size;
  const float* ratio;
  const bool* moving;
  const uint32_t* words;  // [WordsFor(size, 2)]
  const float* scale;     // [num_blocks]
  const int64_t* row_splits;
  int64_t num_blocks;
  float* new_residual;  // [size]
};

// Sparse words (word_format.h) of the elements whose sum outweighs its variance:
//   r = residual + x, v = variance + moments
//   selected if r is a normal number and r * r > alpha * v
//   exponents[b] = e, the exponent of the largest |r| selected in the block; -128: none
//   sent if selected and d = FallOf(r, that largest) <= kMostFall
//   new_residual = r, new_variance = v * decay; both 0 if sent.
// *nonfinite is the number of elements whose r or v is infinite or NaN.
struct PackUnambiguous {
  CutVector<const float> x;
  CutVector<const float> moments;
  const float* residual;
  const float* variance;
  int64_t size;  // Less than 2^kIndexBits.
  float alpha;
  float decay;
  const int64_t* row_splits;
  int64_t num_blocks;
  uint32_t* scratch;    // [SparseScratch(size, num_blocks)]
  uint32_t* words;      // [size], of which the first *count are written.
  int64_t* count;       // The number of elements sent.
  int8_t* exponents;    // [num_blocks]
  float* new_residual;  // [size]
  float* new_variance;  // [size]
  int64_t* nonfinite;
};

// Sparse words, with d = 0, of the elements beyond t, the threshold of their block:
//   r and v as above; sent if |r| > t and, with variance, r * r > alpha * v
//   new_residual = r - (+-t) if sent, with the sign of r, else r
//   new_variance = decay * (sent ? max((v - (2 * t) * |r|) + t * t, 0) : v).
struct PackOverThreshold {
  CutVector<const float> x;
  CutVector<const float> moments;  // Only if variance is given.
  const float* residual;
  const float* variance;   // [size] or null
  int64_t size;            // Less than 2^kIndexBits.
  const float* threshold;  // [num_blocks], positive
  float alpha;
  float decay;
  const int64_t* row_splits;
  int64_t num_blocks;
  uint32_t* scratch;    // [SparseScratch(size, 0)]
  uint32_t* words;      // [size], of which the first *count are written.
  int64_t* count;       // The number of elements sent.
  float* new_residual;  // [size]
  float* new_variance;  // [size] if variance is given
  int64_t* nonfinite;
};

// The mean of N sparse vectors, added to 0 in the order of workers:
//   values[j] = ((0 +- scale[0, b] * 2^-d_0j) +- scale[1, b] * 2^-d_1j ...) / float(N)
// where a worker that did not send j adds nothing. Each product is rounded.
struct MeanOfSparse {
  const uint32_t* words;  // [num_workers, num_words], sparse words
  int64_t num_words;
  const float* scale;  // [num_workers, num_blocks]
  int64_t num_workers;
  int64_t size;  // Less than 2^kIndexBits.
  const int64_t* row_splits;
  int64_t num_blocks;
  CutVector<float> values;
};

// The words of the largest elements of each block, and their levels, as
// tfgradcomp/ops/reference/chunks.py defines them. A block has at most `chunk`
// elements.
struct PackLargest {
  CutVector<const float> x;
  int64_t size;
  int64_t k, chunk, bits;
  const int64_t* row_splits;
  int64_t num_blocks;
  uint32_t* words;     // [num_blocks, ChunkFormat(k, chunk, bits).words], of chunks.h
  float* levels;       // [num_blocks, 2^(bits - 1)]
  int64_t* nonfinite;  // The number of elements that are infinite or NaN.
};

// The mean of N vectors of largest elements, added to 0 in the order of workers. An
// element that a worker did not send adds nothing.
struct MeanOfLargest {
  const uint32_t* words;  // [num_workers, num_blocks, words of a block]
  const float* levels;    // [num_workers, num_blocks, 2^(bits - 1)]
  int64_t num_workers;
  int64_t size;
  int64_t k, chunk, bits;
  const int64_t* row_splits;
  int64_t num_blocks;
  CutVector<float> values;
};

// total = x + *factor * y, each operation rounded.
struct AddScaled {
  CutVector<const float> x;
  int64_t size;
  const float* y;
  const float* factor;
  float* total;  // [size]
};

// x rounded at random to one of its two neighbours in bfloat16, given by its bits:
//   rounded[j] = (x_j + (word j of the stream >> 16)) >> 16, as unsigned integers.
struct RoundToBfloat16 {
  const float* x;
  int64_t size;
  const uint64_t* stream;  // {key, high, first}
  uint16_t* rounded;       // [size]
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_KERNELS_H_
