// Words of any base. A warp takes a tile of at most kTile elements, whose codes lie in
// shared memory: there lanes own words, while in device memory they own neighbouring
// elements, so that accesses of either kind are coalesced.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_DIGITS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_DIGITS_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

constexpr int kTile = 1024;

// Where element e of a tile lies in shared memory. The gaps spread over the banks what
// lanes access when each is at its own word.
__device__ inline int PlaceOf(int e) { return e + e / kWarp; }
constexpr int kTilePlaces = kTile + kTile / kWarp;

// A base, and what it takes to divide by it without a division.
struct Base {
  explicit Base(uint64_t base)
      : digits(tfgradcomp_format::DigitsPerWord(base)),
        value(static_cast<uint32_t>(base)),
        last(static_cast<uint32_t>(base - 1)),
        reciprocal(static_cast<uint32_t>((uint64_t{1} << 32) / base)) {}

  // Elements of a tile: whole words of all lanes, as many as fit.
  __host__ __device__ int TileElements() const {
    return kTile / (digits * kWarp) * (digits * kWarp);
  }

  // word / base. The product falls short by less than 1 + word / 2^32 < 2, so the
  // quotient by at most 1. It is 0 for base 2^32, whose `value` is 0.
  __device__ uint32_t Quotient(uint32_t word) const {
    const uint32_t quotient = __umulhi(word, reciprocal);
    return quotient + (word - quotient * value > last);
  }

  int digits;
  uint32_t value;  // Modulo 2^32.
  uint32_t last;   // The largest digit.
  uint32_t reciprocal;
};

// Adds up the codes of the elements [begin, begin + count) over the rows of `words`.
__device__ inline void SumCodesOfTile(const uint32_t* words, int64_t rows,
                                      int64_t words_per_row, const Base& base,
                                      int64_t begin, int count, uint32_t* tile) {
  constexpr int kRowsAtOnce = 4;
  const int64_t first = begin / base.digits;
  const int before = static_cast<int>(begin - first * base.digits);
  for (int word = Lane(); word * base.digits < before + count; word += kWarp) {
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
      uint32_t left[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        left[i] = row + i < rows ? words[(row + i) * words_per_row + first + word] : 0;
      }
      for (int digit = 0; digit < base.digits; ++digit) {
        // The sum of remainders, from the sums of dividends and of quotients.
        uint32_t dividends = 0, quotients = 0;
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          if (row + i >= rows) break;
          dividends += left[i];
          left[i] = base.Quotient(left[i]);
          quotients += left[i];
        }
        const int e = word * base.digits + digit - before;
        if (e < 0 || e >= count) continue;
        uint32_t& sum = tile[PlaceOf(e)];
        sum = (row == 0 ? 0 : sum) + (dividends - quotients * base.value);
      }
    }
  }
}

// Packs a tile whose first element is the first digit of words[0].
__device__ inline void PackTile(const uint32_t* tile, int count, const Base& base,
                                uint32_t* words) {
  for (int word = Lane(); word * base.digits < count; word += kWarp) {
    const int begin = word * base.digits;
    const int end = begin + base.digits < count ? begin + base.digits : count;
    uint32_t packed = 0;
    for (int e = end - 1; e >= begin; --e) {
      packed = packed * base.value + tile[PlaceOf(e)];
    }
    words[word] = packed;
  }
}

__device__ inline int CountOfTile(int64_t size, int64_t begin, int tile_elements) {
  const int64_t left = size - begin;
  return left < tile_elements ? static_cast<int>(left) : tile_elements;
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_DIGITS_H_
