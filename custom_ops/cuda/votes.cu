// The majority vote.

#include "digits.h"
#include "quads.h"
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

// Votes of quads: four at once, of sums below 128, so that each byte has room for a
// carry. A tile is whole words of both bases and whole blocks of coins.
constexpr int kVoteElements = 2560;
constexpr uint32_t kOnes = 0x01010101;

// The reply is plus for sums of codes from `plus` on, none from `none` on, else minus.
struct Limits {
  explicit Limits(const MajorityVote& args) {
    const int64_t workers = args.num_workers, sums = args.base == 2 ? 2 : 1;
    int64_t quorum = args.reply_base == 2 || args.quorum < 1 ? 1 : args.quorum;
    if (quorum > workers) quorum = workers + 1;
    // The vote's net is sums * sum - workers.
    plus = static_cast<uint32_t>((workers + quorum + sums - 1) / sums);
    none = static_cast<uint32_t>((workers - quorum + sums) / sums);
    tie = static_cast<uint32_t>(workers / sums);
    coins = args.stream != nullptr && workers % sums == 0 &&
            (args.reply_base == 2 || args.quorum < 1);
  }

  uint32_t plus, none, tie;
  bool coins;  // Whether coins decide ties.
};

// 1 for each byte that is at least `limit`.
__device__ inline uint32_t FromOn(uint32_t quad, uint32_t limit) {
  return (quad + kOnes * (128 - limit)) >> 7 & kOnes;
}

// The codes of the reply from a quad of sums. A coin, one of the lowest four bits of
// `coins`, adds 1 to a tie or subtracts 1.
template <int kReplyBase>
__device__ inline uint32_t VoteQuad(const Limits& limits, uint32_t quad,
                                    uint32_t coins) {
  if (limits.coins) {
    const uint32_t ties = FromOn(quad ^ kOnes * limits.tie, 1) ^ kOnes;
    quad += 2 * (ties & (coins & 15) * 0x00204081) - ties;
  }
  const uint32_t plus = FromOn(quad, limits.plus);
  return kReplyBase == 2 ? plus : plus + FromOn(quad, limits.none);
}

// The word of the codes quad_at(0), quad_at(1), ..., of which only `left` count.
template <int kReplyBase, typename QuadAt>
__device__ inline uint32_t PackQuads(int left, const QuadAt& quad_at) {
  constexpr uint32_t kBase = kReplyBase, kSquare = kBase * kBase;
  uint32_t packed = 0;
#pragma unroll
  for (int i = CommonBase<kReplyBase>::kQuads - 1; i >= 0; --i) {
    // The product's upper byte is the quad as a number.
    const uint32_t product =
        quad_at(i) * (1 << 24 | kBase << 16 | kSquare << 8 | kSquare * kBase);
    packed = packed * (kSquare * kSquare) + (product >> 24);
  }
  if (left >= CommonBase<kReplyBase>::kDigits) return packed;
  uint32_t power = 1;
  for (int i = 0; i < left; ++i) power *= kBase;
  return packed % power;
}

template <int kBase, int kReplyBase>
__global__ void __launch_bounds__(kThreads)
    QuadVoteKernel(MajorityVote args, Limits limits, int64_t words_per_worker) {
  using Base = CommonBase<kBase>;
  using ReplyBase = CommonBase<kReplyBase>;
  constexpr int kTileWords = kVoteElements / Base::kDigits;
  constexpr int kParts = (kTileWords - 1) / Base::kAllWords + 1;
  __shared__ uint32_t tiles[kWarpsPerBlock][kParts * Base::kPlaces];
  __shared__ uint32_t all_coins[kWarpsPerBlock][kParts * Base::kElements / kWarp];
  uint32_t *tile = tiles[WarpInBlock()], *coins = all_coins[WarpInBlock()];
  for (int64_t t = FirstTile(); t * kVoteElements < args.size; t += TileStride()) {
    const int64_t begin = t * kVoteElements, word = t * kTileWords;
    const int words = CountOfTile(words_per_worker, word, kTileWords);
    if (limits.coins && Lane() < kVoteElements / 128) {
      const RandomStream stream = ReadStream(args.stream);
      tfgradcomp_format::Philox(stream, stream.CoinBlock(begin + 128 * Lane()),
                                coins + 4 * Lane());
    }
    __syncwarp();
    for (int part = 0; part < kParts; ++part) {
      const int own = part * kWarp + Lane(), first = own * Base::kWords;
      uint32_t quads[Base::kQuads];
      SumWords<kBase, 4>(args.words + word + first, static_cast<int>(args.num_workers),
                         words_per_worker, words - first,
                         static_cast<uint32_t>(args.base), quads);
#pragma unroll
      for (int q = 0; q < Base::kQuads; ++q) {
        const int e = 4 * (own * Base::kQuads + q);
        const uint32_t coin = limits.coins ? coins[e / kWarp] >> (e % kWarp) : 0;
        tile[own * Base::kStride + q] = VoteQuad<kReplyBase>(limits, quads[q], coin);
      }
    }
    __syncwarp();
    const int count = CountOfTile(args.size, begin, kVoteElements);
    uint32_t* votes = args.votes + begin / ReplyBase::kDigits;
    for (int i = Lane(); i * ReplyBase::kDigits < count; i += kWarp) {
      votes[i] = PackQuads<kReplyBase>(count - i * ReplyBase::kDigits, [&](int q) {
        return tile[Base::PlaceOf(i * ReplyBase::kQuads + q)];
      });
    }
    __syncwarp();
  }
}

template <int kBase, int kReplyBase>
const char* RunQuadVote(const Gpu& gpu, const MajorityVote& args,
                        int64_t words_per_worker) {
  return Launch(gpu, CeilDiv(args.size, kVoteElements),
                QuadVoteKernel<kBase, kReplyBase>, args, Limits(args),
                words_per_worker);
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
  if (args.num_workers * (args.base - 1) < 128) {
    const auto run = args.base == 2         ? RunQuadVote<2, 3>
                     : args.reply_base == 2 ? RunQuadVote<3, 2>
                                            : RunQuadVote<3, 3>;
    return run(gpu, args, words_per_worker);
  }
  const Base base(args.base), reply_base(args.reply_base);
  return Launch(gpu, CeilDiv(args.size, reply_base.TileElements()), CodeVoteKernel,
                args, base, reply_base, words_per_worker);
}

}  // namespace tfgradcomp
