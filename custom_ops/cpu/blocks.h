// Sums over blocks, in the order that word_format.h states.

// A function of a chunk's rows, added in adjacent pairs.
template <int Rows, typename RowOf>
inline __attribute__((always_inline)) auto SumRows(const float* p,
                                                   const RowOf& row_of) {
  if constexpr (Rows == 1) {
    return row_of(p);
  } else {
    const auto left = SumRows<Rows / 2>(p, row_of);
    return left + SumRows<Rows / 2>(p + Rows / 2 * kLanes, row_of);
  }
}

struct Magnitudes {
  D l1;
  Magnitudes operator+(const Magnitudes& other) const { return {Add(l1, other.l1)}; }
};

// Adds the magnitudes of four rows, a group, as the first two steps of that order.
inline D MagnitudeOfGroup(const F (&group)[kParts]) {
  D rows[kGroup / kLanes];
  for (int row = 0; row < kGroup / kLanes; ++row) {
    rows[row] = Abs(WidenRow(group, row));
  }
  return Add(Add(rows[0], rows[1]), Add(rows[2], rows[3]));
}

// The other steps, over the groups of a chunk.
template <int Groups = kChunk / kGroup>
inline D SumGroups(const D* groups) {
  if constexpr (Groups == 1) {
    return *groups;
  } else {
    return Add(SumGroups<Groups / 2>(groups),
               SumGroups<Groups / 2>(groups + Groups / 2));
  }
}

inline double MagnitudeOfChunk(const float* p) {
  const Magnitudes rows =
      SumRows<kRows>(p, [](const float* row) { return Magnitudes{Abs(Widen(row))}; });
  return SumLanes(rows.l1);
}

struct Moments {
  D l1, squares, sum;
  Moments operator+(const Moments& other) const {
    return {Add(l1, other.l1), Add(squares, other.squares), Add(sum, other.sum)};
  }
};

// Calls sum(p, slot) with the 512 elements of a chunk for each block in it, with zeros
// for the elements of other blocks. `values` are the chunk's elements; `block` is its
// first block.
template <typename Sum>
inline void EachBlock(const float* values, int64_t size, const int64_t* row_splits,
                      int64_t num_blocks, int64_t chunk, int64_t block,
                      const Sum& sum) {
  const int64_t first = chunk * kChunk, last = Smaller(size, first + kChunk);
  for (int64_t b = block; b < num_blocks && row_splits[b] < last; ++b) {
    const int64_t from = row_splits[b] > first ? row_splits[b] - first : 0;
    const int64_t to = Smaller(row_splits[b + 1], last) - first;
    alignas(kCacheLine) float buffer[kChunk] = {};
    memcpy(buffer + from, values + from, (to - from) * sizeof(float));
    sum(buffer, chunk + b);
  }
}

// The same for the chunks [begin, end) of a vector.
template <typename Sum>
inline void EachChunk(const CutVector<const float>& x, int64_t size,
                      const int64_t* row_splits, int64_t num_blocks, int64_t begin,
                      int64_t end, const Sum& sum) {
  CutReader<kChunk> reader(x, size);
  int64_t block = BlockOf(begin * kChunk, row_splits, num_blocks);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = chunk * kChunk;
    while (row_splits[block + 1] <= first) ++block;
    if (first + kChunk <= row_splits[block + 1] && first >= row_splits[block]) {
      // Loads a later chunk while this chunk is summed.
      reader.Prefetch(first + 2 * kChunk, kChunk);
      sum(reader.At(first, kChunk), chunk + block);
    } else {
      alignas(kCacheLine) float values[kChunk];
      reader.Copy(first, Smaller(size, first + kChunk), values);
      EachBlock(values, size, row_splits, num_blocks, chunk, block, sum);
    }
  }
}

// Combines a block's slots in adjacent pairs, in place.
template <typename Combine>
inline double OverChunks(double* scratch, const int64_t* row_splits, int64_t block,
                         const Combine& combine) {
  const int64_t first = row_splits[block] / kChunk;
  double* slots = scratch + first + block;
  int64_t count = (row_splits[block + 1] - 1) / kChunk - first + 1;
  for (; count > 1; count = (count + 1) / 2) {
    for (int64_t i = 0; i < count / 2; ++i) {
      slots[i] = combine(slots[2 * i], slots[2 * i + 1]);
    }
    if (count % 2) slots[count / 2] = slots[count - 1];
  }
  return slots[0];
}

inline double Plus(double a, double b) { return a + b; }
inline double Larger(double a, double b) { return a > b || a != a ? a : b; }

// Sums that nobody asks for are not computed: the compiler drops what is not stored.
template <int64_t Sums>
void Statistics(const Parallel& parallel, const BlockStatistics& args) {
  const int64_t slots = SlotsFor(args.size, args.num_blocks);
  double* const largest = args.scratch;
  double* const l1 = largest + slots;
  double* const squares = l1 + slots;
  double* const sum = squares + slots;
  double* const nonfinite = sum + slots;
  For(parallel, CeilDiv(args.size, kChunk), 4 * kChunk,
      [&](int64_t begin, int64_t end) {
        EachChunk(args.x, args.size, args.row_splits, args.num_blocks, begin, end,
                  [&](const float* p, int64_t slot) {
                    const Moments rows = SumRows<kRows>(p, [](const float* row) {
                      const D value = Widen(row);
                      return Moments{Abs(value), Mul(value, value), value};
                    });
                    if constexpr (Sums & kSumL1) l1[slot] = SumLanes(rows.l1);
                    if constexpr (Sums & kSumSquares) {
                      squares[slot] = SumLanes(rows.squares);
                    }
                    if constexpr (Sums & kSumPlain) sum[slot] = SumLanes(rows.sum);
                    I most = SetInts(0);
                    for (int i = 0; i < kChunk; i += kWidth) {
                      most = MaxInts(most, MagnitudeBits(Load(p + i)));
                    }
                    int32_t lanes[kWidth];
                    StoreInts(lanes, most);
                    int32_t bits = 0;
                    for (int32_t lane : lanes) bits = lane > bits ? lane : bits;
                    float magnitude;
                    memcpy(&magnitude, &bits, sizeof(magnitude));
                    largest[slot] = magnitude;
                    int64_t count = 0;
                    constexpr int32_t kInfinity = 0x7F800000;
                    for (int i = 0; bits >= kInfinity && i < kChunk; ++i) {
                      count += (BitsOf(p[i]) & 0x7FFFFFFF) >= kInfinity;
                    }
                    nonfinite[slot] = static_cast<double>(count);
                  });
      });
  For(parallel, args.num_blocks, 40, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      double* const results[] = {largest, l1, squares, sum, nonfinite};
      for (int s = 0; s < 5; ++s) {
        double value = 0;
        if (s == 0) {
          value = OverChunks(results[s], args.row_splits, b, Larger);
        } else if (s == 4 || (Sums & (1 << (s - 1)))) {
          value = OverChunks(results[s], args.row_splits, b, Plus);
        }
        args.statistics[s * args.num_blocks + b] = value + 0.0;
      }
    }
  });
}

void Kernel(const Parallel& parallel, const BlockStatistics& args) {
  static constexpr decltype(&Statistics<0>) kOf[] = {
      Statistics<0>, Statistics<1>, Statistics<2>, Statistics<3>,
      Statistics<4>, Statistics<5>, Statistics<6>, Statistics<7>};
  kOf[args.sums](parallel, args);
}
