// The levels of large blocks: the purpose of each scan of their elements.

#ifndef TFGRADCOMP_CUSTOM_OPS_CUDA_LARGE_LEVELS_H_
#define TFGRADCOMP_CUSTOM_OPS_CUDA_LARGE_LEVELS_H_

#include "large_blocks.h"

namespace tfgradcomp {
namespace {

// Finds the extremes. A block with elements that are not finite is finished.
struct Extremes {
  __device__ void operator()(const FindLevels& args, LargeBlock& state,
                             int64_t piece) const {
    uint32_t most = 0, most_turned = 0;
    int nonfinite = 0;
    ForEachKey(args, state, piece, [&](uint32_t key) {
      most = Larger()(most, key);
      most_turned = Larger()(most_turned, ~key);
      nonfinite += ExponentOf(NumberOf(key)) == kInfinite;
    });
    most = CombineThreads(most, Larger());
    most_turned = CombineThreads(most_turned, Larger());
    nonfinite = CombineThreads(nonfinite, Plus());
    if (threadIdx.x != 0) return;
    atomicMax(&state.largest, most);
    atomicMax(&state.smallest_turned, most_turned);
    LargeBlock::Add(state.nonfinite, nonfinite);
  }

  __device__ void Decide(const FindLevels& args, LargeBlock& state) const {
    const auto nonfinite = static_cast<int64_t>(LargeBlock::Read(state.nonfinite));
    if (nonfinite != 0) {
      if (WarpInBlock() == 0) AddCount(args.nonfinite, nonfinite);
      for (int64_t k = threadIdx.x; k < args.count; k += blockDim.x) {
        LevelOf(args, state, k) = 0;
      }
      if (threadIdx.x == 0) state.is_finished = 1;
    } else if (threadIdx.x == 0 && args.rule == LevelRule::kOptimal) {
      LevelOf(args, state, 0) = NumberOf(state.Smallest());
      LevelOf(args, state, args.count - 1) = NumberOf(state.Largest());
    }
  }
};

// Looks for the levels first, first + spacing, ... of all blocks, for one digit of
// each: the levels of quantiles, or the middles between the levels that are `reach`
// before and behind them. kMost: at least the number of targets.
template <int kMost>
struct Search {
  int64_t first, spacing, reach;
  int targets, shift;

  __device__ int64_t LevelAt(int target) const { return first + target * spacing; }

  // A target is above the low key and up to the high one.
  __device__ uint32_t Low(const FindLevels& args, const LargeBlock& state,
                          int target) const {
    if (reach == 0) return state.Smallest() - 1;
    return KeyOf(LevelOf(args, state, LevelAt(target) - reach));
  }

  __device__ uint32_t High(const FindLevels& args, const LargeBlock& state,
                           int target) const {
    if (reach == 0) return state.Largest();
    return KeyOf(LevelOf(args, state, LevelAt(target) + reach));
  }

  __device__ void operator()(const FindLevels& args, LargeBlock& state,
                             int64_t piece) const {
    __shared__ uint32_t bins[kMost][kBins];
    __shared__ uint32_t lows[kMost], highs[kMost], prefixes[kMost];
    const FixedPoint fixed_point = state.Fixed();
    const bool sums_too = shift == kFirstShift && reach > 0;
    // The first digits of all quantiles are the same counts.
    const int counted = reach == 0 && shift == kFirstShift ? 1 : targets;
    for (int t = 0; t < kMost; ++t) bins[t][threadIdx.x] = 0;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kMost) {
      const bool is_counted = thread < counted;
      lows[thread] = is_counted ? Low(args, state, thread) : 0xFFFFFFFF;
      highs[thread] = is_counted ? High(args, state, thread) : 0;
      prefixes[thread] = shift == kFirstShift ? 0 : state.prefixes[thread];
    }
    __syncthreads();
    int64_t sums[kMost] = {};
    ForEachKey(args, state, piece, [&](uint32_t key) {
      const int q = sums_too ? fixed_point(key) : 0;
#pragma unroll
      for (int t = 0; t < kMost; ++t) {
        const uint32_t digit = (key ^ prefixes[t]) >> shift;
        if (digit >= kBins || key <= lows[t] || key > highs[t]) continue;
        sums[t] += q;
        atomicAdd(&bins[t][digit], 1u);
      }
    });
    __syncthreads();
    for (int t = 0; t < targets; ++t) {
      LargeBlock::Add(state.bins[t][threadIdx.x],
                      bins[t < counted ? t : 0][threadIdx.x]);
    }
    if (!sums_too) return;
#pragma unroll
    for (int t = 0; t < kMost; ++t) {
      if (t >= targets) break;
      const int64_t sum = CombineThreads(sums[t], Plus());
      if (threadIdx.x == 0) LargeBlock::Add(state.sums[t], sum);
    }
  }

  __device__ void Decide(const FindLevels& args, LargeBlock& state) const {
    for (int t = 0; t < targets; ++t) {
      const uint32_t digit = kBins - 1 - threadIdx.x;  // The largest comes first.
      const int64_t count = LargeBlock::Take(state.bins[t][digit]);
      const int64_t total = CombineThreads(count, Plus());
      const int64_t rank = shift == kFirstShift ? FirstRank(args, state, t, total)
                                                : LargeBlock::Read(state.ranks[t]);
      const uint32_t prefix = shift == kFirstShift ? 0 : state.prefixes[t];
      float& level = LevelOf(args, state, LevelAt(t));
      const uint32_t high = High(args, state, t);
      const int64_t before = SumBefore(count);  // All threads have read the rank.
      if (rank == 0) {
        if (threadIdx.x == 0) state.ranks[t] = 0;
        if (threadIdx.x == 0) level = NumberOf(high);
      } else if (before < rank && rank <= before + count) {
        state.ranks[t] = rank - before;
        state.prefixes[t] = prefix | digit << shift;
        if (shift == 0) level = NumberOf(prefix | digit);
      }
    }
    __syncthreads();
    if (threadIdx.x < kTargets) state.sums[threadIdx.x] = 0;
  }

  // `total` is the number of elements between the low key and the high one.
  __device__ int64_t FirstRank(const FindLevels& args, const LargeBlock& state, int t,
                               int64_t total) const {
    if (reach == 0) {
      const int64_t size =
          args.row_splits[state.block + 1] - args.row_splits[state.block];
      const int64_t k = LevelAt(t), steps = args.count - 1;
      return size - (2 * k * (size - 1) + steps) / (2 * steps);
    }
    const FixedPoint fixed_point = state.Fixed();
    const int64_t low = fixed_point(Low(args, state, t));
    const int64_t width = fixed_point(High(args, state, t)) - low;
    if (width == 0) return 0;  // The level is the high one.
    const int64_t sum = static_cast<int64_t>(LargeBlock::Read(state.sums[t]));
    return CeilDiv(sum - low * total, width);
  }
};

// Looks for one digit of the largest key at which size * q less the sum of the elements
// as large or larger is negative (see FindSymmetric).
struct SearchSymmetric {
  int shift;

  __device__ void operator()(const FindLevels& args, LargeBlock& state,
                             int64_t piece) const {
    // Sums of the lower and of the upper bits, because shared memory adds no more than
    // 32 bits at once. Those of a piece fit.
    constexpr int kLowBits = 15;
    static_assert(kPiece <= int64_t{1} << (32 - kLowBits - 1), "");
    __shared__ uint32_t lows[kBins], highs[kBins];
    const FixedPoint fixed_point = state.Fixed();
    const uint32_t prefix = state.prefixes[0];
    lows[threadIdx.x] = highs[threadIdx.x] = 0;
    __syncthreads();
    ForEachKey(args, state, piece, [&](uint32_t key) {
      const uint32_t digit =
          shift == kFirstShift ? key >> shift : (key ^ prefix) >> shift;
      if (digit >= kBins) return;
      const uint32_t q = static_cast<uint32_t>(fixed_point(key));
      atomicAdd(&lows[digit], q & ((1u << kLowBits) - 1));
      atomicAdd(&highs[digit], q >> kLowBits);
    });
    __syncthreads();
    LargeBlock::Add(state.bins[0][threadIdx.x],
                    (int64_t{highs[threadIdx.x]} << kLowBits) + lows[threadIdx.x]);
  }

  __device__ void Decide(const FindLevels& args, LargeBlock& state) const {
    const int64_t size =
        args.row_splits[state.block + 1] - args.row_splits[state.block];
    const FixedPoint fixed_point = state.Fixed();
    const uint32_t digit = kBins - 1 - threadIdx.x;  // The largest comes first.
    const int64_t own = LargeBlock::Take(state.bins[0][digit]);
    const int64_t above = LargeBlock::Read(state.above) + SumBefore(own);
    const uint32_t prefix = LargeBlock::Read(state.prefixes[0]);
    const uint32_t key = prefix | digit << shift;
    // Magnitudes are not below the key of 0.
    const bool is_negative = KeyOf(0) <= key && key <= state.Largest() &&
                             size * fixed_point(key) - (above + own) < 0;
    const uint32_t most = CombineThreads(is_negative ? digit + 1 : 0, Larger());
    if (shift == kFirstShift && threadIdx.x == 0) state.has_prefix = most > 0;
    if (most != digit + 1) return;
    state.prefixes[0] = key;
    state.above = above;
  }
};

// The purpose of an edge between the elements.
enum class EdgeFor { kNeighbours, kSymmetric, kMean, kMeans };

// Looks at both sides of an edge.
struct Edge {
  EdgeFor what;

  __device__ uint32_t Of(const LargeBlock& state) const {
    if (what != EdgeFor::kNeighbours) return state.edge;
    const uint32_t smallest = state.Smallest();
    return state.has_prefix ? Larger()(state.prefixes[0], smallest) : smallest;
  }

  __device__ void operator()(const FindLevels& args, LargeBlock& state,
                             int64_t piece) const {
    const FixedPoint fixed_point = state.Fixed();
    const uint32_t edge = Of(state);
    int64_t sum_above = 0, number_up_to = 0, number_equal = 0;
    uint32_t last = 0, next_turned = 0;
    ForEachKey(args, state, piece, [&](uint32_t key) {
      if (key > edge) {
        sum_above += fixed_point(key);
        next_turned = Larger()(next_turned, ~key);
        return;
      }
      ++number_up_to;
      number_equal += key == edge;
      last = Larger()(last, key);
    });
    sum_above = CombineThreads(sum_above, Plus());
    number_up_to = CombineThreads(number_up_to, Plus());
    number_equal = CombineThreads(number_equal, Plus());
    last = CombineThreads(last, Larger());
    next_turned = CombineThreads(next_turned, Larger());
    if (threadIdx.x != 0) return;
    LargeBlock::Add(state.sum_above, sum_above);
    LargeBlock::Add(state.number_up_to, number_up_to);
    LargeBlock::Add(state.number_equal, number_equal);
    if (what != EdgeFor::kNeighbours) return;
    atomicMax(&state.last, last);
    atomicMax(&state.next_turned, next_turned);
  }

  __device__ void Decide(const FindLevels& args, LargeBlock& state) const {
    if (threadIdx.x != 0) return;
    const FixedPoint fixed_point = state.Fixed();
    const int64_t size =
        args.row_splits[state.block + 1] - args.row_splits[state.block];
    const int64_t sum_above = LargeBlock::Take(state.sum_above);
    const int64_t number_up_to = LargeBlock::Take(state.number_up_to);
    const int64_t number_equal = LargeBlock::Take(state.number_equal);
    const auto set = [&](int64_t k, float level) { LevelOf(args, state, k) = level; };
    if (what == EdgeFor::kNeighbours) {
      state.edge = LargeBlock::Read(state.last);
    } else if (what == EdgeFor::kSymmetric) {
      uint32_t low = state.edge, high = ~state.next_turned;
      if (state.Smallest() == state.Largest()) high = low;
      const int64_t q = fixed_point(low);
      const int64_t excess = size * q - (sum_above + number_equal * q);
      const int64_t next_excess = size * fixed_point(high) - sum_above;
      // All elements with q = 0 are equally near: the smallest is taken.
      if (q == 0) low = state.Smallest();
      const float level = NumberOf(-excess <= next_excess ? low : high);
      set(0, 0 - level);  // No -0.
      set(1, level);
    } else if (what == EdgeFor::kMean) {
      // The edge was 0, which is below all keys.
      const float middle = fixed_point.Mean(sum_above, size);
      set(1, middle);
      state.above = sum_above;
      state.edge = KeyOf(middle) - 1;
    } else {
      const float middle = LevelOf(args, state, 1);
      const int64_t below = state.above - sum_above;
      const int64_t rest = size - number_up_to;
      set(0, number_up_to > 0 ? fixed_point.Mean(below, number_up_to) : middle);
      set(2, rest > 0 ? fixed_point.Mean(sum_above, rest) : middle);
    }
  }
};

// -- The rules ----------------------------------------------------------------------

// Returns whether there may be large blocks, for FindLevelsOfLarge.
inline bool FindsLevelsOfLarge(const FindLevels& args) {
  return args.size > kLargeBlock && args.count <= kMostLevels;
}

inline const char* RunSearch(const Gpu& gpu, const FindLevels& args, int64_t first,
                             int64_t spacing, int64_t reach, int64_t targets) {
  const char* error = nullptr;
  for (int shift = kFirstShift; shift >= 0 && error == nullptr; shift -= kDigitBits) {
    const int number = static_cast<int>(targets);
    const auto look = [&](auto search) {
      return RunLook(gpu, args, decltype(search){first, spacing, reach, number, shift});
    };
    error = number == 1   ? look(Search<1>())
            : number <= 4 ? look(Search<4>())
                          : look(Search<kTargets>());
  }
  return error;
}

inline const char* FindLevelsOfLarge(const Gpu& gpu, const FindLevels& args) {
  const int64_t count = args.count;
  const LargeBlocks large(args);
  const char* error =
      SetZero(gpu, large.words, MostLargeBlocks(args.size) * kLargeBlockWords + 1);
  const auto then = [&](auto run) {
    if (error == nullptr) error = run();
  };
  const auto look_at_edge = [&](EdgeFor what) {
    then([&] { return RunLook(gpu, args, Edge{what}); });
  };
  then([&] {
    return Launch(gpu, CeilDiv(args.num_blocks, kWarp), ListPiecesKernel, args, large);
  });
  then([&] { return RunLook(gpu, args, Extremes{}); });
  switch (args.rule) {
    case LevelRule::kOptimal:
      for (int64_t step = count - 1; step > 1; step /= 2) {
        then([&] {
          return RunSearch(gpu, args, step / 2, step, step / 2, (count - 1) / step);
        });
      }
      for (int64_t sweep = 0; sweep < args.sweeps; ++sweep) {
        for (int64_t k = 1; k < count - 1; ++k) {
          then([&] { return RunSearch(gpu, args, k, 1, 1, 1); });
        }
      }
      break;
    case LevelRule::kQuantiles:
      for (int64_t k = 0; k < count; k += kTargets) {
        then([&] {
          const int64_t left = count - k;
          return RunSearch(gpu, args, k, 1, 0, left < kTargets ? left : kTargets);
        });
      }
      break;
    case LevelRule::kSymmetric:
      for (int shift = kFirstShift; shift >= 0; shift -= kDigitBits) {
        then([&] { return RunLook(gpu, args, SearchSymmetric{shift}); });
      }
      look_at_edge(EdgeFor::kNeighbours);
      look_at_edge(EdgeFor::kSymmetric);
      break;
    case LevelRule::kMeans:
      look_at_edge(EdgeFor::kMean);
      look_at_edge(EdgeFor::kMeans);
      break;
  }
  return error;
}

}  // namespace
}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_CUDA_LARGE_LEVELS_H_
