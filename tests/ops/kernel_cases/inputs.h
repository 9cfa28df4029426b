// Shapes of calls, and the inputs of all kernels for a shape.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_INPUTS_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_INPUTS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "../../../custom_ops/chunks.h"
#include "../../../custom_ops/word_format.h"
#include "array.h"

namespace tfgradcomp_cases {

using tfgradcomp_format::WordsFor;

enum class Layout { kOneBlock, kRagged, kBlocksOfOne, kBuckets };
constexpr Layout kLayouts[] = {Layout::kOneBlock, Layout::kRagged, Layout::kBlocksOfOne,
                               Layout::kBuckets};
constexpr int64_t kBucket = 2048;
constexpr const char* kLayoutNames[] = {"one block", "ragged", "blocks of one",
                                        "buckets"};

// The numbers of inputs. Measurements take some like those of gradients. Checks take
// numbers of many orders of magnitude, with zeros and denormals among them; of all
// numbers, some are infinite or NaN as well, but only where a result does not depend on
// the sign of a NaN that a processor computes: this sign differs between processors.
enum class Values { kLikeGradients, kFinite, kAll };

struct Shape {
  int64_t size;
  Layout layout;
  int64_t num_workers;
};

// Returns shapes of at most `most` elements. Of each size every layout that it has,
// with two numbers of workers that differ from layout to layout and from size to size:
// all pairs occur. 9001 elements, of which FewShapes has one block and ragged ones,
// have one number of workers there. Large blocks take ways of their own on a GPU: from
// 4097 elements on, from 65537, and from 131072, more chunks than one warp adds up.
// These need one block, and an even number of workers, for numbers that are all finite.
inline std::vector<Shape> Shapes(int64_t most) {
  constexpr int64_t kNumWorkers[] = {1, 2, 3, 4, 5, 8, 9};
  std::vector<Shape> shapes;
  int turn = 0;
  for (int64_t size :
       {0,  1,  2,   3,   19,  20,   21,   31,   32,     33,           63,
        64, 65, 511, 512, 513, 1000, 4500, 9001, 150001, (1 << 20) + 7}) {
    if (size > most) break;
    for (Layout layout : kLayouts) {
      if (size > 1000 && layout == Layout::kBlocksOfOne) continue;  // Slow to emulate.
      if (size <= kBucket && layout == Layout::kBuckets) continue;  // One block.
      if ((size == 4500 || size == 150001) && layout != Layout::kOneBlock) continue;
      if (size == 4500 || size > 10000) {
        if (layout == Layout::kOneBlock) shapes.push_back({size, layout, 4});
        if (size > 10000) shapes.push_back({size, layout, 3});
        continue;
      }
      ++turn;
      for (int i : {turn, turn + 2}) {
        shapes.push_back({size, layout, kNumWorkers[i % 7]});
        if (size > kBucket && layout != Layout::kBuckets) break;
      }
    }
  }
  return shapes;
}

// Returns few shapes of at most `most` elements, for checks that are slow.
inline std::vector<Shape> FewShapes(int64_t most) {
  std::vector<Shape> shapes;
  for (int64_t size : {513, 9001, 150001}) {
    if (size > most) break;
    for (int64_t workers : {2, 3, 4}) {
      shapes.push_back({size, Layout::kOneBlock, workers});
    }
    shapes.push_back({size, Layout::kRagged, 4});
  }
  return shapes;
}

// The inputs of all kernels, of one shape; the same on every machine.
class Inputs {
 public:
  Inputs(const Shape& shape, uint64_t seed, Values values)
      : size(shape.size),
        num_workers(shape.num_workers),
        values_(values),
        state_(seed) {
    const bool nonfinite = values == Values::kAll;
    std::vector<int64_t> splits = {0};
    while (splits.back() < size) {
      int64_t width = size;
      if (shape.layout == Layout::kRagged) width = int64_t{1} + Below(1 << Below(13));
      if (shape.layout == Layout::kBlocksOfOne) width = 1;
      if (shape.layout == Layout::kBuckets) width = kBucket;
      splits.push_back(std::min(splits.back() + width, size));
    }
    num_blocks = static_cast<int64_t>(splits.size()) - 1;
    row_splits = Array<int64_t>(num_blocks + 1);
    for (int64_t b = 0; b <= num_blocks; ++b) row_splits[b] = splits[b];

    const float infinity = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    x = Numbers(size);
    momentum = Numbers(size);
    residual = Numbers(size);
    moments = Magnitudes(size);
    variance = Magnitudes(size);
    for (int64_t j = 0; j < size; ++j) {
      moments[j] *= residual[j] * residual[j];
      variance[j] *= Below(3) == 0 ? 0.01f : residual[j] * residual[j];
    }
    if (nonfinite) Put(variance, {infinity, nan});
    if (nonfinite) Put(x, {infinity, -infinity, nan});
    wild = Numbers(size);
    if (nonfinite) Put(wild, {infinity, -infinity, nan, -nan});
    coarse = Array<float>(size);
    for (int64_t j = 0; j < size; ++j) coarse[j] = std::round(residual[j]);
    scale = Scales();
    wild_scale = Scales();
    if (nonfinite) Put(wild_scale, {infinity, nan, 0.0f});
    limit = Magnitudes(num_blocks);
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (Below(2) == 0) limit[b] = infinity;
    }
    ratio[0] = 0.75f;
    yes[0] = true;
    for (int i = 0; i < 3; ++i) stream[i] = uint64_t{Next()} << 32 | Next();
  }

  // Returns codes below the base.
  Array<int32_t> Codes(uint64_t base) {
    Array<int32_t> codes(size);
    for (int64_t j = 0; j < size; ++j) codes[j] = static_cast<int32_t>(Code(base));
    return codes;
  }

  // Returns the words of one vector for each worker.
  Array<uint32_t> Words(uint64_t base) {
    const int64_t words = WordsFor(size, base);
    const int64_t digits = tfgradcomp_format::DigitsPerWord(base);
    Array<uint32_t> packed(num_workers * words);
    for (int64_t worker = 0; worker < num_workers; ++worker) {
      for (int64_t word = 0; word < words; ++word) {
        uint64_t value = 0;
        for (int64_t j = std::min((word + 1) * digits, size); j > word * digits; --j) {
          value = value * base + Code(base);
        }
        packed[worker * words + word] = static_cast<uint32_t>(value);
      }
    }
    return packed;
  }

  // Returns `count` levels for each block of each worker, in ascending order. In some
  // blocks all levels are equal.
  Array<float> Levels(int64_t count) {
    Array<float> levels = Numbers(num_workers * num_blocks * count);
    for (int64_t first = 0; first < levels.count(); first += count) {
      std::sort(levels.data() + first, levels.data() + first + count);
      if (Below(8) == 0) std::fill_n(levels.data() + first, count, levels[first]);
    }
    return levels;
  }

  // Returns sparse words of about one element in `one_in`, `*row` words for each
  // worker. Rows are filled up with words that stand for no element.
  Array<uint32_t> SparseWords(uint32_t one_in, int64_t* row) {
    std::vector<std::vector<uint32_t>> words(num_workers);
    *row = 0;
    for (std::vector<uint32_t>& one : words) {
      for (int64_t j = 0; j < size; ++j) {
        if (Below(one_in) == 0) one.push_back((Next() & 0xF0000000) | j);
      }
      *row = std::max(*row, static_cast<int64_t>(one.size()) + Below(3));
    }
    Array<uint32_t> all(num_workers * *row);
    for (int64_t i = 0; i < all.count(); ++i) {
      const std::vector<uint32_t>& one = words[i / *row];
      const size_t at = i % *row;
      all[i] = at < one.size() ? one[at] : tfgradcomp_format::kNothing;
    }
    return all;
  }

  // Returns the ends of the blocks cut into chunks of at most so many elements.
  Array<int64_t> Chunks(int64_t chunk) {
    std::vector<int64_t> splits = {0};
    for (int64_t b = 0; b < num_blocks; ++b) {
      while (splits.back() < row_splits[b + 1]) {
        splits.push_back(std::min(splits.back() + chunk, row_splits[b + 1]));
      }
    }
    Array<int64_t> chunks(static_cast<int64_t>(splits.size()));
    std::copy(splits.begin(), splits.end(), chunks.data());
    return chunks;
  }

  // No lambda: nvcc warns of lambdas of the host in functions of both.
  struct SetBits {
    uint32_t* words;

    TFGRADCOMP_HOST_DEVICE void operator()(int64_t word, uint32_t bits) const {
      words[word] |= bits;
    }
  };

  // Returns the words of the largest elements of chunks, which are any positions, for
  // each worker.
  Array<uint32_t> LargestWords(const tfgradcomp_format::ChunkFormat& format,
                               Array<int64_t>& splits) {
    const int64_t blocks = splits.count() - 1;
    Array<uint32_t> words(num_workers * blocks * format.words);
    for (int64_t row = 0; row < num_workers * blocks; ++row) {
      const int64_t block = row % blocks, width = splits[block + 1] - splits[block];
      int64_t rank = 0;
      for (int64_t j = 0; j < width && rank < format.k; ++j) {
        if (Below(static_cast<uint32_t>(width)) > 2 * format.k) continue;
        format.Write(rank++, j, Below(1u << format.bits),
                     SetBits{words.data() + row * format.words});
      }
    }
    return words;
  }

  Array<float> Floats(int64_t count) { return Numbers(count); }

  int64_t size, num_workers, num_blocks;
  Array<int64_t> row_splits;
  Array<float> x, momentum, residual;  // [size]
  Array<float> moments, variance;      // [size], around the squares of residual
  Array<float> wild;                   // [size], with NaN of either sign
  Array<float> coarse;                 // [size], many of them equal
  Array<float> scale, wild_scale;      // [num_workers, num_blocks]
  Array<float> limit;                  // [num_blocks]
  Array<float> ratio{1};
  Array<bool> yes{1}, no{1};
  Array<uint64_t> stream{3};

 private:
  uint32_t Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }

  uint32_t Below(uint32_t bound) {
    return static_cast<uint32_t>(uint64_t{Next()} * bound >> 32);
  }

  // Returns a random code. The smallest and the largest codes are frequent, because the
  // extreme words consist of them.
  uint64_t Code(uint64_t base) {
    const uint32_t random = Next();
    if (random % 8 == 0) return base - 1;
    if (random % 8 == 1) return 0;
    return (uint64_t{Next()} * base) >> 32;
  }

  Array<float> Numbers(int64_t count) {
    Array<float> numbers(count);
    for (int64_t j = 0; j < count; ++j) {
      if (values_ == Values::kLikeGradients) {
        numbers[j] = Uniform() + Uniform() + Uniform() + Uniform();
        continue;
      }
      const uint32_t kind = Below(16);
      uint32_t bits = Next() & 0x807FFFFF;
      if (kind == 0) bits &= 0x80000000;                   // Zero.
      if (kind > 1) bits |= (127 - 12 + Below(24)) << 23;  // Else denormal.
      std::memcpy(&numbers[j], &bits, sizeof(bits));
    }
    return numbers;
  }

  Array<float> Magnitudes(int64_t count) {
    Array<float> numbers = Numbers(count);
    for (int64_t j = 0; j < count; ++j) numbers[j] = std::fabs(numbers[j]);
    return numbers;
  }

  // Returns scales of all blocks. Those like gradients' are above all magnitudes.
  Array<float> Scales() {
    Array<float> scales = Magnitudes(num_workers * num_blocks);
    for (int64_t i = 0; i < scales.count(); ++i) {
      if (values_ == Values::kLikeGradients) scales[i] += kLargest;
    }
    return scales;
  }

  // Returns a number from -kLargest / 4 to kLargest / 4.
  float Uniform() { return static_cast<int32_t>(Next()) * (kLargest * 0x1p-33f); }

  void Put(Array<float>& numbers, std::initializer_list<float> special) {
    for (float value : special) {
      if (numbers.count() > 0) {
        numbers[Below(static_cast<uint32_t>(numbers.count()))] = value;
      }
    }
  }

  static constexpr float kLargest = 4;
  Values values_;
  uint64_t state_;
};

// Returns a part of the name of a call: an argument that the call differs in from
// others.
inline std::string With(const char* key, uint64_t value) {
  return std::string(" ") + key + "=" + std::to_string(value);
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_INPUTS_H_
