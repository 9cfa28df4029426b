// The elements of a block, scanned by a thread block as often as needed: in shared
// memory if they fit.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_ELEMENTS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_ELEMENTS_H_

#include "block.h"
#include "keys.h"

namespace tfgradcomp {
namespace {

// Threads of a thread block for blocks of up to kKept elements; for larger ones they
// are kManyThreads.
constexpr int kKept = 4096, kFewThreads = 256;

// The elements of a block, or their magnitudes. All threads call its functions, and all
// get the same result.
class Elements {
 public:
  __device__ Elements(const float* x, int64_t size, bool magnitudes, uint32_t* keys)
      : size(size), x_(x), magnitudes_(magnitudes), keys_(keys) {
    uint32_t most = 0, most_reversed = 0;
    InBatches(
        0, size, [&](int64_t i) { return KeyAt(i); },
        [&](int64_t i, uint32_t key) {
          if (size <= kKept) keys_[i] = key;
          most = Larger()(most, key);
          most_reversed = Larger()(most_reversed, ~key);
        });
    largest = CombineThreads(most, Larger());
    smallest = ~CombineThreads(most_reversed, Larger());
    fixed_point = FixedPoint(smallest, largest);
  }

  // The key of an element.
  __device__ uint32_t At(int64_t i) const {
    return size <= kKept ? keys_[i] : KeyAt(i);
  }

  // The sum of value(key) over the elements.
  template <typename Value>
  __device__ int64_t Sum(const Value& value) const {
    int64_t sum = 0;
    ForEach(0, size, [&](uint32_t key) { sum += value(key); });
    return CombineThreads(sum, Plus());
  }

  // The largest element that is at most `last`. It must exist.
  __device__ uint32_t LargestUpTo(uint32_t last) const {
    uint32_t most = 0;
    ForEach(0, size,
            [&](uint32_t key) { most = key <= last ? Larger()(most, key) : most; });
    return CombineThreads(most, Larger());
  }

  // The smallest element above `first`. It must exist.
  __device__ uint32_t SmallestAbove(uint32_t first) const {
    uint32_t most = 0;  // Of the keys reversed.
    ForEach(0, size,
            [&](uint32_t key) { most = key > first ? Larger()(most, ~key) : most; });
    return ~CombineThreads(most, Larger());
  }

  // The rank-th largest of the elements that are at most `last`, counted from 1. It
  // must be at least `first`. It is found digit by digit, from the highest digit in
  // which these two differ, by the number of elements with each digit.
  __device__ uint32_t Select(int64_t rank, uint32_t first, uint32_t last) const {
    constexpr int kDigitBits = 8, kBins = 1 << kDigitBits;
    constexpr int64_t kCounted = 1 << 17;  // No more at once than a bin holds.
    static_assert(kBins <= kFewThreads, "");
    __shared__ uint32_t bins[kBins];
    __shared__ uint32_t found_digit;
    __shared__ int64_t found_before;
    int bits = 32 - __clz(static_cast<int>(first ^ last));
    uint32_t key = static_cast<uint32_t>(uint64_t{last} >> bits << bits);
    while (bits > 0) {
      const int shift = bits > kDigitBits ? bits - kDigitBits : 0;
      const uint32_t digits = 1u << (bits - shift);
      int64_t count = 0;  // Of digit kBins - 1 - threadIdx.x: the largest comes first.
      for (int64_t begin = 0; begin < size; begin += kCounted) {
        if (threadIdx.x < kBins) bins[threadIdx.x] = 0;
        __syncthreads();
        ForEach(begin, begin + kCounted < size ? begin + kCounted : size,
                [&](uint32_t other) {
                  const uint32_t digit = (other ^ key) >> shift;
                  if (other > last || digit >= digits) return;
                  atomicAdd(&bins[kBins - 1 - digit], 1u);
                });
        __syncthreads();
        if (threadIdx.x < kBins) count += bins[threadIdx.x];
      }
      const int64_t before = SumBefore(count);
      if (before < rank && rank <= before + count) {
        found_digit = kBins - 1 - threadIdx.x;
        found_before = before;
      }
      __syncthreads();
      key |= found_digit << shift;
      rank -= found_before;
      bits = shift;
    }
    return key;
  }

  int64_t size;
  uint32_t smallest, largest;
  FixedPoint fixed_point;

 private:
  __device__ uint32_t KeyAt(int64_t i) const {
    return KeyOf(magnitudes_ ? fabsf(x_[i]) : x_[i]);
  }

  // Calls body(i, load(i)) for i in [begin, end), a part of them in each thread.
  template <typename Load, typename Body>
  static __device__ void InBatches(int64_t begin, int64_t end, const Load& load,
                                   const Body& body) {
    constexpr int kAtOnce = 4;  // Loads, so that the memory has enough to do.
    const int threads = static_cast<int>(blockDim.x);
    for (int64_t i = begin + threadIdx.x; i < end; i += kAtOnce * threads) {
      uint32_t key[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        key[k] = i + k * threads < end ? load(i + k * threads) : 0;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (i + k * threads < end) body(i + k * threads, key[k]);
      }
    }
  }

  // Calls body(key) for the elements [begin, end).
  template <typename Body>
  __device__ void ForEach(int64_t begin, int64_t end, const Body& body) const {
    InBatches(
        begin, end, [&](int64_t i) { return At(i); },
        [&](int64_t, uint32_t key) { body(key); });
  }

  const float* x_;
  bool magnitudes_;
  uint32_t* keys_;  // [kKept], shared, of the elements of a block of at most so many.
};

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_ELEMENTS_H_
