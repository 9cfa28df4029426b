// The word format: what C++ and CUDA put into a 32-bit word, stated only here.
//
// Codes of base s sit k = DigitsPerWord(s) to a word, least significant digit first:
// element j is digit j mod k of word j / k. k is the largest with s^k <= 2^32. Unused
// digits are 0. For s = 2, element j is bit j mod 32.
//
// A sparse word is one element; see below.
//
// This file also states what else CPU, GPU and pure TensorFlow must agree on to the
// bit: the random numbers of an element, and the order in which a block is summed.

#ifndef TFGRADCOMP_CUSTOM_OPS_WORD_FORMAT_H_
#define TFGRADCOMP_CUSTOM_OPS_WORD_FORMAT_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TFGRADCOMP_HOST_DEVICE __host__ __device__
#else
#define TFGRADCOMP_HOST_DEVICE
#endif

// Each instruction set is compiled from the same text. An inline function with linkage
// would be shared between them, perhaps with instructions that the machine lacks.
namespace {
namespace tfgradcomp_format {

// -- Digits -----------------------------------------------------------------------

constexpr int kTernaryDigits = 20;  // DigitsPerWord(3)

TFGRADCOMP_HOST_DEVICE constexpr int DigitsPerWord(uint64_t base) {
  int digits = 0;
  for (uint64_t power = base; power <= (uint64_t{1} << 32); power *= base) {
    ++digits;
    if (power > (uint64_t{1} << 32) / base) break;
  }
  return digits;
}

TFGRADCOMP_HOST_DEVICE constexpr int64_t WordsFor(int64_t count, uint64_t base) {
  const int64_t digits = DigitsPerWord(base);
  return (count + digits - 1) / digits;
}

// -- Signs ------------------------------------------------------------------------

TFGRADCOMP_HOST_DEVICE inline uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TFGRADCOMP_HOST_DEVICE inline float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Signs and zeros are read from the bits, because processors differ in their treatment
// of denormals. A NaN has the sign of its sign bit.
TFGRADCOMP_HOST_DEVICE inline bool IsZero(float x) { return (BitsOf(x) << 1) == 0; }

// 1 for plus; +0 and -0 count as plus.
TFGRADCOMP_HOST_DEVICE inline uint32_t SignCode(float x) {
  return (BitsOf(x) >> 31) == 0 || IsZero(x);
}

// -- Sparse words -----------------------------------------------------------------

// The word of element j is its sign (the top bit), d in three bits and j in the lowest
// kIndexBits. It stands for +-scale * 2^-d, with the scale of j's block. Words are in
// the order of j. kNothing, like any word whose index is beyond the vector, stands for
// no element; such words come last.
constexpr int kIndexBits = 28, kMostFall = 7;
constexpr uint32_t kIndexMask = (uint32_t{1} << kIndexBits) - 1;
constexpr uint32_t kNothing = 0xFFFFFFFF;

// The word has the sign of the number with these bits.
TFGRADCOMP_HOST_DEVICE inline uint32_t SparseWord(uint32_t bits, int d, int64_t j) {
  return (bits & 0x80000000) | static_cast<uint32_t>(d) << kIndexBits |
         static_cast<uint32_t>(j);
}

TFGRADCOMP_HOST_DEVICE inline int64_t IndexOf(uint32_t word) {
  return word & kIndexMask;
}

// +-2^-d
TFGRADCOMP_HOST_DEVICE inline float FactorOf(uint32_t word) {
  const uint32_t d = word >> kIndexBits & kMostFall;
  return FloatOf((word & 0x80000000) | (127 - d) << 23);
}

TFGRADCOMP_HOST_DEVICE inline bool IsNormal(float x) {
  const uint32_t magnitude = BitsOf(x) & 0x7FFFFFFF;
  return magnitude >= 0x00800000 && magnitude < 0x7F800000;
}

// d of a normal number x. The largest number of the block is rounded down to a power of
// two. x is rounded to the nearer power of two, the upper of two equally near, but not
// above that of the largest.
TFGRADCOMP_HOST_DEVICE inline int FallOf(float x, float largest) {
  const uint32_t top = (BitsOf(largest) & 0x7FFFFFFF) >> 23;
  // Adding 1 to the top bit of the mantissa carries where x is to be rounded up.
  const uint32_t nearer = ((BitsOf(x) & 0x7FFFFFFF) + (1 << 22)) >> 23;
  return nearer < top ? static_cast<int>(top - nearer) : 0;
}

// -- Random numbers ---------------------------------------------------------------

// The random numbers that the elements of a vector draw from a stream: Philox-4x32-10
// (Salmon et al., 2011), in blocks of four words. Block B has the key `key` and the
// counter whose low 64 bits are B, modulo 2^64, and whose high 64 bits are `high`. With
// o = 128 * `first`, element j draws one of these:
//   a word:            32 bits, part o + j of the blocks from 0 on
//   a uniform number:  n / 2^24, where the upper 8 bits of n are part o + j of the
//                      blocks from 0 on, the lower 16 of the blocks from 2^63 on
//   a coin:            1 bit, part o + j of the blocks from 0 on
// Parts of k bits are counted from the lowest bits of a block's first word.
//
// So a piece of a vector that begins at element o, a multiple of 128, draws the numbers
// of the vector if its `first` is larger by o / 128. A comparison with a uniform number
// needs its lower 16 bits, and the block that has them, only if the upper 8 bits do not
// decide: once in 256.
struct RandomStream {
  uint64_t key;
  uint64_t high;
  uint64_t first;

  // The blocks that hold the word, the upper and the lower bits of the uniform number,
  // and the coin of an element.
  TFGRADCOMP_HOST_DEVICE uint64_t WordBlock(int64_t element) const {
    return 32 * first + static_cast<uint64_t>(element) / 4;
  }
  TFGRADCOMP_HOST_DEVICE uint64_t UpperBlock(int64_t element) const {
    return 8 * first + static_cast<uint64_t>(element) / 16;
  }
  TFGRADCOMP_HOST_DEVICE uint64_t LowerBlock(int64_t element) const {
    return (uint64_t{1} << 63) + 16 * first + static_cast<uint64_t>(element) / 8;
  }
  TFGRADCOMP_HOST_DEVICE uint64_t CoinBlock(int64_t element) const {
    return first + static_cast<uint64_t>(element) / 128;
  }
};

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

TFGRADCOMP_HOST_DEVICE inline void Philox(RandomStream stream, uint64_t block,
                                          uint32_t words[4]) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream.high);
  uint32_t c3 = static_cast<uint32_t>(stream.high >> 32);
  uint32_t k0 = static_cast<uint32_t>(stream.key);
  uint32_t k1 = static_cast<uint32_t>(stream.key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxM0} * c0, p1 = uint64_t{kPhiloxM1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

TFGRADCOMP_HOST_DEVICE inline float Uniform(uint32_t upper, uint32_t lower) {
  return static_cast<float>(upper << 16 | lower) * (1.0f / (1 << 24));
}

// The uniform number of one element.
TFGRADCOMP_HOST_DEVICE inline float Uniform(RandomStream stream, int64_t element) {
  uint32_t upper[4], lower[4];
  Philox(stream, stream.UpperBlock(element), upper);
  Philox(stream, stream.LowerBlock(element), lower);
  return Uniform(upper[element % 16 / 4] >> (8 * (element % 4)) & 0xFF,
                 lower[element % 8 / 2] >> (16 * (element % 2)) & 0xFFFF);
}

// -- The order of a sum -----------------------------------------------------------

// Sums are in float64, in an order that does not depend on the number of threads. The
// flat vector is cut into chunks of kChunk elements, counted from its start (not from a
// block's). A chunk is kRows rows of kLanes elements. Elements outside the block count
// as 0.
//   1. Rows are added in adjacent pairs: 0 + 1, 2 + 3, ...; then pairs of these; ...
//   2. The kLanes sums are added by halves: lane j + lane j + 4, then + 2, then + 1.
//   3. A block's chunks are added in adjacent pairs, counted from its first chunk. A
//      last chunk without a partner goes up as it is.
constexpr int64_t kChunk = 512, kLanes = 8, kRows = kChunk / kLanes;

// Partial sums of chunk c for block b are kept in slot c + b. It is unique, because
// blocks are in order and none is empty.
TFGRADCOMP_HOST_DEVICE constexpr int64_t SlotsFor(int64_t size, int64_t num_blocks) {
  return (size + kChunk - 1) / kChunk + num_blocks;
}

// Scratch words for the choice of the elements to send: two bits per element, a count
// per chunk, one per 1024 chunks and the largest element of each block.
TFGRADCOMP_HOST_DEVICE constexpr int64_t SparseScratch(int64_t size,
                                                       int64_t num_blocks) {
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  return 2 * WordsFor(size, 2) + chunks + (chunks + 1023) / 1024 + num_blocks;
}

// In blocks of more elements than this, all thread blocks of a GPU look for the levels,
// each in pieces of the block. The scratch has words of 64 bits: a state for each such
// block, in the slot begin / kLargeBlock, and a list of the pieces.
#ifndef TFGRADCOMP_LARGE_BLOCK
#define TFGRADCOMP_LARGE_BLOCK (1 << 16)
#endif
constexpr int64_t kLargeBlock = TFGRADCOMP_LARGE_BLOCK, kPiece = kLargeBlock / 4;
constexpr int64_t kLargeBlockWords = 2112;

TFGRADCOMP_HOST_DEVICE constexpr int64_t MostLargeBlocks(int64_t size) {
  return size > kLargeBlock ? size / kLargeBlock + 1 : 0;
}

TFGRADCOMP_HOST_DEVICE constexpr int64_t MostPieces(int64_t size) {
  return size > kLargeBlock ? size / kPiece + MostLargeBlocks(size) : 0;
}

TFGRADCOMP_HOST_DEVICE constexpr int64_t LevelsScratch(int64_t size) {
  return size > kLargeBlock
             ? MostLargeBlocks(size) * kLargeBlockWords + 1 + MostPieces(size)
             : 0;
}

}  // namespace tfgradcomp_format
}  // namespace

#endif  // TFGRADCOMP_CUSTOM_OPS_WORD_FORMAT_H_
