// Words of signs. A warp takes a chunk of kChunk elements in kSteps steps: in step m,
// the lanes hold the elements of the chunk's word m, and a ballot is that word.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_SIGNS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_SIGNS_H_

#include "warp.h"

namespace tfgradcomp {
namespace {

constexpr int kSteps = kChunk / kWarp;

// The coins of the elements of word `word`.
__device__ inline uint32_t Coins(RandomStream stream, int64_t word) {
  uint32_t random[4];
  tfgradcomp_format::Philox(stream, stream.CoinBlock(word * kWarp), random);
  return random[word % 4];
}

// Collects the words of a chunk: lane m keeps word m.
class SignWords {
 public:
  __device__ void Add(int step, bool inside, float value) {
    const uint32_t plus = __ballot_sync(kAllLanes, inside && SignCode(value));
    const uint32_t zeros = __ballot_sync(kAllLanes, inside && IsZero(value));
    if (Lane() != step) return;
    plus_ = plus;
    zeros_ = zeros;
  }

  __device__ void Store(int64_t chunk, int64_t size, const uint64_t* stream,
                        uint32_t* words) const {
    const int64_t word = chunk * kSteps + Lane();
    if (Lane() >= kSteps || word * kWarp >= size) return;
    uint32_t minus = 0;
    if (stream != nullptr && zeros_ != 0) {
      minus = zeros_ & ~Coins(ReadStream(stream), word);
    }
    words[word] = plus_ & ~minus;
  }

 private:
  uint32_t plus_ = 0, zeros_ = 0;
};

// Element j, of block `block`, of the mean of scaled signs.
__device__ inline float MeanSign(const uint32_t* words, int64_t words_per_worker,
                                 const float* scale, int64_t num_blocks,
                                 int64_t num_workers, int64_t j, int64_t block) {
  words += j / kWarp;
  scale += block;
  float total = 0;
  for (int64_t worker = 0; worker < num_workers; ++worker) {
    const float value = *words >> (j % kWarp) & 1 ? *scale : -*scale;
    total = worker == 0 ? value : __fadd_rn(total, value);
    words += words_per_worker;
    scale += num_blocks;
  }
  return __fdiv_rn(total, static_cast<float>(num_workers));
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_SIGNS_H_
