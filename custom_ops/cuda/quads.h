// Sums of codes of the common bases, where they are below 256: a quad has those of four
// neighbouring elements, a byte each. A lane adds up its words in registers; a warp's
// quads lie in shared memory in the order of the elements.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_QUADS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_QUADS_H_

#include "fours.h"

namespace tfgradcomp {
namespace {

constexpr uint64_t Power(uint64_t base, int exponent) {
  return exponent == 0 ? 1 : base * Power(base, exponent - 1);
}

// A base that is known to the compiler.
template <uint32_t kBase>
struct CommonBase {
  static constexpr uint32_t kValue = kBase;
  static constexpr int kDigits = tfgradcomp_format::DigitsPerWord(kBase);
  // Words of a lane: as many as make whole quads.
  static constexpr int kWords = kDigits % 4 == 0 ? 1 : kDigits % 2 == 0 ? 2 : 4;
  static constexpr int kQuads = kWords * kDigits / 4;
  // Quads of a lane in shared memory. An odd number spreads the lanes over the banks.
  static constexpr int kStride = kQuads | 1;
  // Of all lanes.
  static constexpr int kAllWords = kWarp * kWords, kAllQuads = kWarp * kQuads;
  static constexpr int kElements = 4 * kAllQuads, kPlaces = kWarp * kStride;

  // The place of a quad in shared memory.
  __device__ static int PlaceOf(int quad) {
    return quad + quad / kQuads * (kStride - kQuads);
  }
};

// The digits of a word, the last digit first, as Digits of digits.h finds them. Here
// the fraction f / 2^32 is above word / power, or equal, by less than 1 / power.
template <uint32_t kBase>
class CommonDigits {
 public:
  CommonDigits() = default;

  // A word that is no word of the base has the digits of word % power.
  __device__ explicit CommonDigits(uint32_t word) {
    const uint32_t rest = word % kPower;
    fraction_ = rest * kWhole + (__umulhi(rest, kPart) >> kShift) + 1;
  }

  // `base` is kBase, but the compiler must not know it: it would replace the chain of
  // products by products with powers of the base, which takes one more for each digit.
  __device__ uint32_t Next(uint32_t base) {
    const uint64_t product = uint64_t{fraction_} * base;
    fraction_ = static_cast<uint32_t>(product);
    return static_cast<uint32_t>(product >> 32);
  }

 private:
  static constexpr uint64_t kOne = uint64_t{1} << 32;
  static constexpr uint32_t kPower =
      static_cast<uint32_t>(Power(kBase, CommonBase<kBase>::kDigits));
  // 2^32 / power = kWhole + kPart / 2^(32 + kShift), where kPart is rounded up.
  static constexpr uint32_t kWhole = kOne / kPower;
  static constexpr int kShift = kOne % kPower < kPower / 4 ? 2 : 0;
  static constexpr uint64_t kScaled = (kOne % kPower) << (32 + kShift);
  static constexpr uint32_t kPart = kScaled / kPower + 1;
  // Rounding kPart up and adding 1 makes f larger by less than 1 + power / 2^(32 +
  // kShift), which has to be at most 2^32 / power.
  static_assert((uint64_t{kPower} * kPower >> kShift) <= kOne * (kOne - kPower), "");

  uint32_t fraction_;
};

// Adds the digits of words, one of each row, to the quads from element `first` on.
template <uint32_t kBase, int kRows>
__device__ inline void AddDigits(const uint32_t (&words)[kRows], uint32_t base,
                                 int first, uint32_t* quads) {
  if constexpr (kBase == 2) {
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      // The products are of four bits, each moved to a byte of its own.
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        quads[q] += (words[i] >> (4 * q) & 15) * 0x00204081 & 0x01010101;
      }
    }
  } else {
    CommonDigits<kBase> digits[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) digits[i] = CommonDigits<kBase>(words[i]);
#pragma unroll
    for (int e = first + CommonBase<kBase>::kDigits - 1; e >= first; --e) {
      uint32_t sum = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum += digits[i].Next(base);
      quads[e / 4] += sum << (8 * (e % 4));
    }
  }
}

// Adds up the codes of a lane's words over the rows. Only `left` words of a row are
// left from `words` on; the codes of others are 0. `base`: see CommonDigits.
template <uint32_t kBase, int kRowsAtOnce>
__device__ inline void SumWords(const uint32_t* words, int rows, int64_t words_per_row,
                                int64_t left, uint32_t base,
                                uint32_t (&quads)[CommonBase<kBase>::kQuads]) {
#pragma unroll
  for (uint32_t& quad : quads) quad = 0;
  for (int row = 0; row < rows; row += kRowsAtOnce) {
#pragma unroll
    for (int word = 0; word < CommonBase<kBase>::kWords; ++word) {
      uint32_t loaded[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const bool there = word < left && row + i < rows;
        loaded[i] = there ? words[i * words_per_row + word] : 0;
      }
      AddDigits<kBase>(loaded, base, word * CommonBase<kBase>::kDigits, quads);
    }
    words += kRowsAtOnce * words_per_row;
  }
}

// The quads of a warp's words, `left` words from `words` on, to shared memory.
template <uint32_t kBase, int kRowsAtOnce>
__device__ inline void SumToShared(const uint32_t* words, int rows,
                                   int64_t words_per_row, int64_t left, uint32_t base,
                                   uint32_t* shared) {
  using Base = CommonBase<kBase>;
  const int first = Lane() * Base::kWords;
  uint32_t quads[Base::kQuads];
  SumWords<kBase, kRowsAtOnce>(words + first, rows, words_per_row, left - first, base,
                               quads);
#pragma unroll
  for (int q = 0; q < Base::kQuads; ++q) shared[Lane() * Base::kStride + q] = quads[q];
}

// Whether quads hold the sums of so many codes.
inline bool QuadsHold(int64_t rows, uint64_t base) {
  return base < 256 && rows <= 255 / static_cast<int64_t>(base - 1);
}

// Calls run(base) with a CommonBase, or other() if the base is none.
template <typename Run, typename Other>
const char* ForBase(uint64_t base, const Run& run, const Other& other) {
  switch (base) {
    case 2:
      return run(CommonBase<2>());
    case 3:
      return run(CommonBase<3>());
    case 5:
      return run(CommonBase<5>());
    case 9:
      return run(CommonBase<9>());
    case 17:
      return run(CommonBase<17>());
    default:
      return other();
  }
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_QUADS_H_
