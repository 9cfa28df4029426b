// The majority vote.

#include "digits.h"
#include "signs.h"

namespace tfgradcomp {
namespace {

// Votes on signs with a reply of signs: 32 votes at once, bit-sliced. Plane p holds bit
// p of the number of plus votes of each element of a word. One thread has several
// words, so that there are enough loads in flight even with few workers.
template <int kPlanes, int kWords>
__global__ void __launch_bounds__(kThreads)
    SignVoteKernel(MajorityVote args, int64_t words_per_worker) {
  const uint64_t half = static_cast<uint64_t>(args.num_workers) / 2;
  for (int64_t tile = FirstTile(); tile * kWarp * kWords < words_per_worker;
       tile += TileStride()) {
    const int64_t first = tile * kWarp * kWords + Lane();
    uint32_t planes[kWords][kPlanes] = {};
#pragma unroll 4
    for (int64_t worker = 0; worker < args.num_workers; ++worker) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int64_t word = first + i * kWarp;
        uint32_t carry =
            word < words_per_worker ? args.words[worker * words_per_worker + word] : 0;
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
          const uint32_t both = planes[i][p] & carry;
          planes[i][p] ^= carry;
          carry = both;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int64_t word = first + i * kWarp;
      if (word >= words_per_worker) break;
      uint32_t more = 0, equal = ~0u;  // Than half of the workers.
#pragma unroll
      for (int p = kPlanes - 1; p >= 0; --p) {
        const uint32_t bit = half >> p & 1 ? ~0u : 0;
        more |= equal & planes[i][p] & ~bit;
        equal &= ~(planes[i][p] ^ bit);
      }
      const int64_t left = args.size - word * kWarp;
      const uint32_t inside = left < kWarp ? (1u << left) - 1 : ~0u;
      const uint32_t ties = args.num_workers % 2 == 0 ? equal & inside : 0;
      if (args.stream != nullptr && ties != 0) {
        more |= ties & Coins(ReadStream(args.stream), word);
      }
      args.votes[word] = more & inside;
    }
  }
}

template <int kPlanes, int kWords>
const char* RunSignVote(const Gpu& gpu, const MajorityVote& args,
                        int64_t words_per_worker) {
  return Launch(gpu, CeilDiv(words_per_worker, kWarp * kWords),
                SignVoteKernel<kPlanes, kWords>, args, words_per_worker);
}

// The code of the reply from the sum of the codes. `coin` decides a tie: -1, 0 or 1.
__device__ uint32_t VoteCode(const MajorityVote& args, uint32_t sum, int coin) {
  const int64_t net = (args.base == 2 ? 2 * int64_t{sum} : sum) - args.num_workers;
  const int vote = net == 0 ? coin : net > 0 ? 1 : -1;
  if (args.reply_base == 2) return vote > 0;
  return (net < 0 ? -net : net) < args.quorum ? 1 : vote + 1;
}

__global__ void __launch_bounds__(kThreads)
    CodeVoteKernel(MajorityVote args, Base base, Base reply_base,
                   int64_t words_per_worker) {
  __shared__ uint32_t tiles[kWarpsPerBlock][kTilePlaces];
  uint32_t* tile = tiles[WarpInBlock()];
  const uint32_t tie =
      static_cast<uint32_t>(args.num_workers) / (args.base == 2 ? 2 : 1);
  const bool ties =
      args.stream != nullptr && (args.base == 3 || args.num_workers % 2 == 0);
  const int step = reply_base.TileElements();
  for (int64_t t = FirstTile(); t * step < args.size; t += TileStride()) {
    const int64_t begin = t * step;
    const int count = CountOfTile(args.size, begin, step);
    SumCodesOfTile<4>(args.words, args.num_workers, words_per_worker, base, begin,
                      count, tile);
    __syncwarp();
    // Four elements at a time, whose coins are in one word.
    for (int e = 4 * Lane(); e < count; e += 4 * kWarp) {
      const int end = count - e < 4 ? count - e : 4;
      bool tied = false;
      for (int i = 0; i < end; ++i) tied |= ties && tile[PlaceOf(e + i)] == tie;
      const int64_t place = begin + e;
      const uint32_t coins =
          tied ? Coins(ReadStream(args.stream), place / kWarp) >> (place % kWarp) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= end) break;
        const int coin = tied ? static_cast<int>(coins >> i & 1) * 2 - 1 : 0;
        uint32_t& code = tile[PlaceOf(e + i)];
        code = VoteCode(args, code, coin);
      }
    }
    __syncwarp();
    PackTile(tile, count, reply_base, args.votes + begin / reply_base.digits);
    __syncwarp();
  }
}

}  // namespace

const char* Run(const Gpu& gpu, const MajorityVote& args) {
  const int64_t words_per_worker = tfgradcomp_format::WordsFor(args.size, args.base);
  if (args.base == 2 && args.reply_base == 2) {
    const int64_t workers = args.num_workers;
    const auto run = workers < 4    ? RunSignVote<2, 4>
                     : workers < 8  ? RunSignVote<3, 4>
                     : workers < 16 ? RunSignVote<4, 4>
                     : workers < 32 ? RunSignVote<5, 4>
                     : workers < 64 ? RunSignVote<6, 2>
                                    : RunSignVote<32, 1>;
    return run(gpu, args, words_per_worker);
  }
  const Base base(args.base), reply_base(args.reply_base);
  return Launch(gpu, CeilDiv(args.size, reply_base.TileElements()), CodeVoteKernel,
                args, base, reply_base, words_per_worker);
}

}  // namespace tfgradcomp
