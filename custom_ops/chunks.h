// The words of a chunk's largest elements, and the parts that their magnitudes are
// split into: what CPU and GPU share. tfgradcomp/ops/reference/chunks.py states both.

#ifndef TFGRADCOMP_CUSTOM_OPS_CHUNKS_H_
#define TFGRADCOMP_CUSTOM_OPS_CHUNKS_H_

#include <cstdint>

#include "word_format.h"

// For each file of its own, as word_format.h explains.
namespace {
namespace tfgradcomp_format {

constexpr int64_t kMostInChunk = 1 << 16;
constexpr int64_t kMostValueBits = 3;

struct ChunkFormat {
  // Of the struct of a kernel. All chunks have the same format.
  template <typename Args>
  TFGRADCOMP_HOST_DEVICE explicit ChunkFormat(const Args& args)
      : ChunkFormat(args.k, args.chunk, args.bits) {}

  TFGRADCOMP_HOST_DEVICE ChunkFormat(int64_t k, int64_t chunk, int64_t bits)
      : k(k), chunk(chunk), bits(bits), low(0) {
    while (chunk / k >> (low + 1) != 0) ++low;
    unary = k + ((chunk - 1) >> low);
    words = (unary + k * (low + bits) + 31) / 32;
    levels = int64_t{1} << (bits - 1);
  }

  // The number of elements that a chunk of some width sends.
  TFGRADCOMP_HOST_DEVICE int64_t Share(int64_t width) const {
    return (k * width + chunk - 1) / chunk;
  }

  // Calls set(w, bits) for the bits to be set in word w for an element: the rank-th of
  // those sent, with a value of its level and its sign.
  template <typename Set>
  TFGRADCOMP_HOST_DEVICE void Write(int64_t rank, int64_t position, uint32_t value,
                                    const Set& set) const {
    const auto put = [&](int64_t at, uint32_t number) {
      const uint64_t shifted = uint64_t{number} << at % 32;
      if (static_cast<uint32_t>(shifted) != 0) {
        set(at / 32, static_cast<uint32_t>(shifted));
      }
      if (shifted >> 32 != 0) set(at / 32 + 1, static_cast<uint32_t>(shifted >> 32));
    };
    put((position >> low) + rank, 1);
    put(unary + rank * low, static_cast<uint32_t>(position & ((1 << low) - 1)));
    put(unary + k * low + rank * bits, value);
  }

  // The position of the rank-th element, whose upper part is bit `at` of the words.
  TFGRADCOMP_HOST_DEVICE int64_t PositionOf(const uint32_t* chunk_words, int64_t at,
                                            int64_t rank) const {
    return ((at - rank) << low) + Read(chunk_words, unary + rank * low, low);
  }

  // Its value: a level of the chunk, with its sign.
  TFGRADCOMP_HOST_DEVICE float ValueOf(const uint32_t* chunk_words,
                                       const float* chunk_levels, int64_t rank) const {
    const uint32_t value = Read(chunk_words, unary + k * low + rank * bits, bits);
    const float level = chunk_levels[value & (levels - 1)];
    return value >> (bits - 1) ? -level : level;
  }

  int64_t k, chunk, bits;
  int64_t low;     // Lower bits of a position.
  int64_t unary;   // Bits of the upper parts of all positions.
  int64_t words;   // Words of a chunk.
  int64_t levels;  // Magnitudes of a chunk.

 private:
  static TFGRADCOMP_HOST_DEVICE uint32_t Read(const uint32_t* words, int64_t at,
                                              int64_t count) {
    if (count == 0) return 0;  // There may be no word at the end.
    uint64_t both = words[at / 32];
    if (at % 32 + count > 32) both |= uint64_t{words[at / 32 + 1]} << 32;
    return static_cast<uint32_t>(both >> at % 32) & ((uint32_t{1} << count) - 1);
  }
};

// The parts of the integers q of a chunk. Part 1 has all. Part p is split at its mean
// into the parts 2 p, below, and 2 p + 1. The last parts, one for each level, have the
// numbers 2^(bits - 1) and up.
struct MagnitudeParts {
  // The part of an integer after so many splits.
  TFGRADCOMP_HOST_DEVICE int Of(int64_t q, int64_t splits) const {
    int part = 1;
    for (int64_t i = 0; i < splits; ++i) {
      part = 2 * part + (q * number[part] >= total[part]);
    }
    return part;
  }

  // The part whose mean is that of a part: itself, or its elder if it has no elements.
  TFGRADCOMP_HOST_DEVICE int Filled(int part) const {
    while (number[part] == 0) part /= 2;
    return part;
  }

  int64_t total[1 << kMostValueBits] = {};
  int64_t number[1 << kMostValueBits] = {};
};

}  // namespace tfgradcomp_format
}  // namespace

#endif  // TFGRADCOMP_CUSTOM_OPS_CHUNKS_H_
