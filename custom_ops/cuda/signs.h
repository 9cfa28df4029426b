// Words of signs. A warp takes a chunk of kChunk elements in kSteps steps: in step m,
// the lanes hold the elements of the chunk's word m.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_SIGNS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_SIGNS_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

constexpr int kSteps = kChunk / kWarp;

__device__ inline int CountOfChunk(int64_t size, int64_t begin) {
  return static_cast<int>(size - begin < kChunk ? size - begin : kChunk);
}

// This lane's elements of the first `count` of a chunk, and 0 instead of the others.
__device__ inline void LoadChunk(const float* chunk, int count, float x[kSteps]) {
#pragma unroll
  for (int m = 0; m < kSteps; ++m) {
    x[m] = m * kWarp < count - Lane() ? chunk[m * kWarp + Lane()] : 0;
  }
}

__device__ inline void StoreChunk(const float x[kSteps], int count, float* chunk) {
#pragma unroll
  for (int m = 0; m < kSteps; ++m) {
    if (m * kWarp < count - Lane()) chunk[m * kWarp + Lane()] = x[m];
  }
}

// A lane collects the bits of its own elements: bit m in step m. Transposed, they are
// the chunk's words: lane m has word m.

// Bit i of lane l becomes bit l of lane i.
__device__ inline uint32_t TransposeBits(uint32_t bits) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    // The lower half of each group of bits stays in the lower lane of a pair, the upper
    // half in the upper lane.
    const int upper = Lane() & distance;
    const uint32_t kept = kAllLanes / ((1u << distance) + 1) << upper;
    const uint32_t other = __shfl_xor_sync(kAllLanes, bits, distance);
    const uint32_t moved = __funnelshift_l(other, other, distance - 2 * upper);
    bits = (bits & kept) | (moved & ~kept);
  }
  return bits;
}

// Lane m gets word m of the chunk, or 0 behind the last word.
__device__ inline uint32_t LoadWord(const uint32_t* words, int64_t begin, int count) {
  return Lane() * kWarp < count ? words[begin / kWarp + Lane()] : 0;
}

// Lane m stores word m of the chunk.
__device__ inline void StoreWord(uint32_t word, int64_t begin, int count,
                                 uint32_t* words) {
  const int left = count - Lane() * kWarp;
  if (left <= 0) return;
  words[begin / kWarp + Lane()] = left < kWarp ? word & ((1u << left) - 1) : word;
}

// 1 for minus: SignCode is 1 for plus.
__device__ inline uint32_t IsMinus(float x) { return BitsOf(x) > 0x80000000; }

__device__ inline uint32_t MinusBits(const float x[kSteps]) {
  uint32_t minus = 0;
#pragma unroll
  for (int m = 0; m < kSteps; ++m) minus |= IsMinus(x[m]) << m;
  return minus;
}

// The coins of the elements of word `word`.
__device__ inline uint32_t Coins(RandomStream stream, int64_t word) {
  uint32_t random[4];
  tfgradcomp_format::Philox(stream, stream.CoinBlock(word * kWarp), random);
  return random[word % 4];
}

// The scaled signs of all workers, and the number of words and of scales of each.
struct ScaledSigns {
  const uint32_t* words;
  const float* scale;
  int64_t num_workers, words_per_worker, num_blocks;
};

__device__ inline float Signed(bool plus, float scale) { return plus ? scale : -scale; }

// If a chunk lies in one block, an element of the mean is one of few numbers, one for
// each combination of the workers' signs. A table has them all: bit w of a number's
// place is the sign of worker w.
constexpr int kTabled = 8, kTablePlaces = 1 << kTabled;

// Lane w has the scale of worker w. A lane computes the places whose lowest kOfLane
// bits are its number.
__device__ inline void TableOfMeans(float own, int num_workers, float* table) {
  constexpr int kOfLane = 5;
  float scale[kTabled];
#pragma unroll
  for (int w = 0; w < kTabled; ++w) scale[w] = __shfl_sync(kAllLanes, own, w);
  float lower = Signed(Lane() & 1, scale[0]);
#pragma unroll
  for (int w = 1; w < kOfLane; ++w) {
    if (w < num_workers) lower = __fadd_rn(lower, Signed(Lane() >> w & 1, scale[w]));
  }
#pragma unroll 1
  for (int place = Lane(); place < 1 << num_workers || place < kWarp; place += kWarp) {
    float total = lower;
#pragma unroll
    for (int w = kOfLane; w < kTabled; ++w) {
      if (w < num_workers) total = __fadd_rn(total, Signed(place >> w & 1, scale[w]));
    }
    table[place] = __fdiv_rn(total, static_cast<float>(num_workers));
  }
}

// The place in the table of each element: byte m % 4 of places[m / 4] in step m.
__device__ inline void PlacesOfMeans(const ScaledSigns& sent, int64_t begin, int count,
                                     uint32_t places[kSteps / 4]) {
  const int worker = Lane() % kTabled;
  const uint32_t* words = sent.words + worker * sent.words_per_worker + begin / kWarp;
#pragma unroll
  for (int i = 0; i < kSteps / 4; ++i) {
    const int m = 4 * i + Lane() / kTabled;
    const bool has = worker < sent.num_workers && m * kWarp < count;
    places[i] = has ? words[m] : 0;
  }
#pragma unroll
  for (int i = 0; i < kSteps / 4; ++i) places[i] = TransposeBits(places[i]);
}

// Calls put(e, mean) for this lane's elements e of a chunk of the mean, which it adds
// up element by element.
template <typename Put>
__device__ void SumSigns(const ScaledSigns& sent, const TileBlocks& blocks,
                         int64_t begin, int count, const Put& put) {
  constexpr int kAtOnce = 2;  // Steps, so that the memory has enough to do.
#pragma unroll 1
  for (int m = 0; m * kWarp < count; m += kAtOnce) {
    int block[kAtOnce];  // Counted from the first.
    float total[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int e = (m + i) * kWarp + Lane();
      block[i] = e < count ? static_cast<int>(blocks.Of(begin + e) - blocks.first) : 0;
    }
    const uint32_t* words = sent.words + begin / kWarp + m;
    const float* scale = sent.scale + blocks.first;
    for (int64_t worker = 0; worker < sent.num_workers; ++worker) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t word = (m + i) * kWarp < count ? words[i] : 0;
        const float value = Signed(word >> Lane() & 1, scale[block[i]]);
        total[i] = worker == 0 ? value : __fadd_rn(total[i], value);
      }
      words += sent.words_per_worker;
      scale += sent.num_blocks;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int e = (m + i) * kWarp + Lane();
      put(e, __fdiv_rn(total[i], static_cast<float>(sent.num_workers)));
    }
  }
}

// This lane's elements of a chunk of the mean. `tile` is shared by the warp.
__device__ inline void MeanOfChunk(const ScaledSigns& sent, const TileBlocks& blocks,
                                   int64_t begin, int count, float tile[kChunk],
                                   float mean[kSteps]) {
  static_assert(kTablePlaces <= kChunk, "");
  if (blocks.first == blocks.last && sent.num_workers <= kTabled) {
    const int num_workers = static_cast<int>(sent.num_workers);
    const float* scale = sent.scale + Lane() * sent.num_blocks + blocks.first;
    const float own = Lane() < num_workers ? *scale : 0;
    uint32_t places[kSteps / 4];
    PlacesOfMeans(sent, begin, count, places);
    TableOfMeans(own, num_workers, tile);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      mean[m] = tile[places[m / 4] >> (8 * (m % 4)) & 0xFF];
    }
  } else {
    SumSigns(sent, blocks, begin, count, [&](int e, float sum) { tile[e] = sum; });
#pragma unroll
    for (int m = 0; m < kSteps; ++m) mean[m] = tile[m * kWarp + Lane()];
  }
  __syncwarp();
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_SIGNS_H_
