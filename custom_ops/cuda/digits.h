// Words of any base. A warp takes a tile of at most kTile elements, whose codes lie in
// shared memory. There each lane owns words; in device memory the lanes own
// neighbouring elements, so that accesses are coalesced.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_DIGITS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_DIGITS_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

constexpr int kTile = 1024;

// The place of element e of a tile in shared memory. The gaps spread the accesses of
// lanes, each to its own word, over the banks.
__device__ inline int PlaceOf(int e) { return e + e / kWarp; }
constexpr int kTilePlaces = kTile + kTile / kWarp;

// A base, with the factors that find digits without a division.
struct Base {
  explicit Base(uint64_t base)
      : digits(tfgradcomp_format::DigitsPerWord(base)),
        value(static_cast<uint32_t>(base)),
        power(1) {
    for (int digit = 0; digit < digits; ++digit) power *= base;
    reciprocal = static_cast<uint32_t>((uint64_t{1} << 32) / power);
    wide_reciprocal = ~uint64_t{0} / power;
  }

  // Elements of a tile: whole words of all lanes, as many as fit.
  __host__ __device__ int TileElements() const {
    return kTile / (digits * kWarp) * (digits * kWarp);
  }

  int digits;
  uint32_t value;            // Modulo 2^32.
  uint64_t power;            // base^digits, at most 2^32: words are below it.
  uint32_t reciprocal;       // 2^32 / power, rounded down.
  uint64_t wide_reciprocal;  // 2^64 / power, less 1 at most.
};

// The digits of a word, the last digit first. The word becomes the least fraction
// f / 2^32 that is not below word / power. It is above it by less than 1 / power, so
// the whole part of each product with the base is the next digit. That takes one
// product per digit; a division would take two.
class Digits {
 public:
  Digits() = default;

  // A word that is no word of the base has the digits of word % power.
  __device__ Digits(uint32_t word, const Base& base) {
    // This product falls short by less than 1 + word / 2^32 < 2, and so by 1 at most.
    uint64_t rest = word - __umulhi(word, base.reciprocal) * base.power;
    if (rest >= base.power) rest -= base.power;
    // As above: the quotient falls short by 1 at most; then it is rounded up.
    const uint64_t quotient = rest * base.wide_reciprocal >> 32;
    const uint64_t remainder = (rest << 32) - quotient * base.power;
    fraction_ =
        static_cast<uint32_t>(quotient + (remainder > 0) + (remainder > base.power));
  }

  __device__ uint32_t Next(const Base& base) {
    if (base.value == 0) return fraction_;  // The one digit of base 2^32.
    const uint64_t product = uint64_t{fraction_} * base.value;
    fraction_ = static_cast<uint32_t>(product);
    return static_cast<uint32_t>(product >> 32);
  }

 private:
  uint32_t fraction_;
};

// Adds up the codes of the elements [begin, begin + count) over the rows of `words`.
template <int kRowsAtOnce>
__device__ void SumCodesOfTile(const uint32_t* words, int64_t rows,
                               int64_t words_per_row, const Base& base, int64_t begin,
                               int count, uint32_t* tile) {
  const int64_t first = begin / base.digits;
  const int before = static_cast<int>(begin - first * base.digits);
  for (int word = Lane(); word * base.digits < before + count; word += kWarp) {
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
      uint32_t loaded[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        loaded[i] =
            row + i < rows ? words[(row + i) * words_per_row + first + word] : 0;
      }
      Digits digits[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) digits[i] = Digits(loaded[i], base);
      for (int digit = base.digits - 1; digit >= 0; --digit) {
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) sum += digits[i].Next(base);
        const int e = word * base.digits + digit - before;
        if (e < 0 || e >= count) continue;
        uint32_t& total = tile[PlaceOf(e)];
        total = row == 0 ? sum : total + sum;
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
