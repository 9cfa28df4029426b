// Levels of blocks: rounding elements to levels, and looking up codes.

// Up to this many levels are looked up in registers.
constexpr int64_t kFewLevels = 16;
// Up to this many even levels are found by an element's position.
constexpr int64_t kMostEvenLevels = 257;

template <bool kFew>
inline F LookUp(const float* table, I codes) {
  return kFew ? PickOf16(table, codes) : Gather(table, codes);
}

// Returns the table of a block's levels. A few levels are copied to a buffer from which
// sixteen can be read.
template <bool kFew>
inline const float* TableOf(const float* levels, int64_t count, float* buffer) {
  if (!kFew) return levels;
  memcpy(buffer, levels, count * sizeof(float));
  return buffer;
}

// Calls piece(block, from, to) for the part of [begin, end) that lies in each block.
// The pieces are in order, so that `piece` may work in whole groups: the next piece
// overwrites what a group has written past the end of its own piece.
template <typename Piece>
inline void EachBlockOf(const int64_t* row_splits, int64_t num_blocks, int64_t begin,
                        int64_t end, const Piece& piece) {
  int64_t block = BlockOf(begin, row_splits, num_blocks);
  for (; begin < end; ++block) {
    const int64_t to = Smaller(end, row_splits[block + 1]);
    piece(block, begin, to);
    begin = to;
  }
}

// The lookup tables of a block's levels. For few levels they include the factors that
// turn distances into thresholds.
template <bool kFew>
class TableToRoundTo {
 public:
  void Take(const float* levels, int64_t count) {
    levels_ = TableOf<kFew>(levels, count, few_);
    count_ = count;
    FindEven();
    by_need_ = kFew && !is_even_;
    for (int64_t k = 0; by_need_ && k < count - 1; ++k) {
      const float width = levels[k + 1] - levels[k];
      by_need_ = width == 0 || IsOrdinary(width);
      // Between equal levels, any element above them is rounded up.
      factors_[k] = width == 0 ? __builtin_inff() : 0x1p16f / width;
    }
  }
  bool by_need() const { return by_need_; }
  bool is_even() const { return is_even_; }

  // The number k of inner levels that are at most x, and the distance of x from level
  // k.
  inline __attribute__((always_inline)) void Find(const F (&x)[4], I (&k)[4],
                                                  F (&distance)[4]) const {
    for (I& part : k) part = SetInts(0);
    for (int64_t inner = 1; inner < count_ - 1; ++inner) {
      const F level = Set(levels_[inner]);
      for (int i = 0; i < 4; ++i) k[i] = AddAtMost(k[i], level, x[i]);
    }
    for (int i = 0; i < 4; ++i) distance[i] = Sub(x[i], LookUp<kFew>(levels_, k[i]));
  }
  F Width(I k) const {
    return Sub(LookUp<kFew>(levels_ + 1, k), LookUp<kFew>(levels_, k));
  }
  F Factor(I k) const { return LookUp<kFew>(factors_, k); }

  // Positions of elements between even levels, as RoundPositions() takes them.
  F Position(F x) const {
    const F position = Mul(Sub(x, Set(first_)), Set(units_));
    return Min(Max(position, Set(0)), Set(last_position_));
  }

  // The same as Find() and Width() of an element. The levels are in order.
  int32_t FindOne(float x, float* distance, float* width) const {
    int64_t k = 0;
    for (int64_t end = count_ - 1; end - k > 1;) {
      const int64_t middle = (k + end) / 2;
      (levels_[middle] <= x ? k : end) = middle;
    }
    *distance = x - levels_[k];
    *width = levels_[k + 1] - levels_[k];
    return static_cast<int32_t>(k);
  }

 private:
  // Whether the levels are so even that no position is wrong by five units: a unit is
  // left to the levels, and each of three roundings is at most a unit.
  void FindEven() {
    const double first = levels_[0];
    const double width =
        (levels_[count_ - 1] - first) / static_cast<double>(count_ - 1);
    is_even_ = count_ <= kMostEvenLevels && IsOrdinary(static_cast<float>(width));
    for (int64_t k = 1; is_even_ && k < count_ - 1; ++k) {
      const double error = levels_[k] - (first + static_cast<double>(k) * width);
      is_even_ = __builtin_fabs(error) <= 0x1p-16 * width;
    }
    first_ = levels_[0];
    units_ = static_cast<float>(0x1p16 / width);
    last_position_ = static_cast<float>(count_ - 1) * 0x1p16f;
  }

  const float* levels_;
  int64_t count_;
  bool by_need_, is_even_;
  float first_, units_, last_position_;  // Of even levels.
  // Sixteen can also be read from the second level on.
  float few_[kFewLevels + 1] = {}, factors_[kFewLevels] = {};
};

// Returns the number of words of a tile that consists of whole words and whole groups.
inline int64_t GroupTile(const Digits& digits) {
  return kGroup * (kTile / kGroup / digits.count());
}

template <bool kFew>
class LevelTiles {
 public:
  LevelTiles(const PackLevels& args, const Digits& digits)
      : args_(args),
        digits_(digits),
        stream_(args.stream == nullptr ? RandomStream{} : ToStream(args.stream)),
        keys_(stream_),
        x_(args.x, args.size),
        undecided_(stream_) {}

  void Pack(int64_t tile) {
    const int64_t words = GroupTile(digits_), elements = words * digits_.count();
    const int64_t first = tile * elements;
    const int64_t last = Smaller(args_.size, first + elements);
    if (args_.stream != nullptr) DrawUpper(keys_, stream_, first, last, upper_);
    EachBlockOf(args_.row_splits, args_.num_blocks, first, last,
                [&](int64_t block, int64_t from, int64_t to) {
                  table_.Take(args_.levels + block * args_.count, args_.count);
                  for (int64_t at = from; at < to; at += kDecided) {
                    CodeGroup(first, at - first, Smaller(kDecided, to - at));
                  }
                  undecided_.CompleteLast([this](Undecided& one) {
                    codes_[one.place] = table_.FindOne(one.x, &one.value, &one.scale);
                  });
                });
    undecided_.Decide(keys_, first, upper_,
                      [this](const Undecided& one) { ++codes_[one.place]; });
    digits_.Pack(codes_, last - first, kTile + kSlack, args_.words + tile * words);
  }

 private:
  // Writes the codes of a group, of which `count` elements are in the block.
  void CodeGroup(int64_t first, int64_t place, int64_t count) {
    const int64_t at = first + place;
    // Prefetches the next tiles while the memory is idle.
    x_.Prefetch(at + kTile, kDecided);
    const float* p = x_.At(at, Smaller(kDecided, args_.size - at));
    F x[4];
    for (int i = 0; i < 4; ++i) x[i] = Load(p + i * kWidth);
    uint64_t undecided = 0;
    if (args_.stream != nullptr && table_.is_even()) {
      RoundEvenly(place, x, &undecided);
    } else {
      Round(first, place, x, &undecided);
    }
    undecided_.Add(undecided & LowBits64(count), [&](int i) {
      return Undecided{static_cast<int32_t>(place) + i, 0, 0, p[i]};
    });
  }

  void RoundEvenly(int64_t place, const F (&x)[4], uint64_t* undecided) {
    for (int i = 0; i < 4; ++i) {
      const int64_t at = place + i * kWidth;
      uint32_t bits;
      StoreInts(codes_ + at, RoundPositions(table_.Position(x[i]), upper_ + at, &bits));
      *undecided |= uint64_t{bits} << (i * kWidth);
    }
  }

  inline __attribute__((always_inline)) void Round(int64_t first, int64_t place,
                                                   const F (&x)[4],
                                                   uint64_t* undecided) {
    F distance[4];
    I k[4];
    table_.Find(x, k, distance);
    uint64_t up = 0;
    if (args_.stream != nullptr) {
      up = table_.by_need() ? UpByNeed(place, k, distance, undecided)
                            : UpAnyhow(first, place, k, distance);
    }
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = static_cast<uint32_t>(up >> (i * kWidth));
      StoreInts(codes_ + place + i * kWidth, AddBits<0>(k[i], bits));
    }
  }

  // The elements that are rounded up; not yet those that the upper bits do not decide.
  inline __attribute__((always_inline)) uint64_t UpByNeed(int64_t place,
                                                          const I (&k)[4],
                                                          const F (&distance)[4],
                                                          uint64_t* undecided) {
    F thresholds[4];
    for (int i = 0; i < 4; ++i) {
      // Elements beyond the last level are rounded up.
      thresholds[i] = Min(Set(0x1p16f), Mul(distance[i], table_.Factor(k[i])));
    }
    return KeptBits(Decide(thresholds, upper_ + place, undecided));
  }

  uint64_t UpAnyhow(int64_t first, int64_t place, const I (&k)[4],
                    const F (&distance)[4]) {
    if (lower_of_ != first) {
      for (int64_t i = 0; i < kTile; i += kDrawn / 2) {
        uint32_t words[kDrawn / 4];
        RandomWords<kDrawnGroups>(keys_, stream_.LowerBlock(first + i), words);
        memcpy(lower_ + i, words, sizeof(words));
      }
      lower_of_ = first;
    }
    const uint16_t* lower = lower_ + place;
    uint64_t up = 0;
    for (int i = 0; i < 4; ++i) {
      const F uniform = Uniforms(upper_ + place + i * kWidth, lower + i * kWidth);
      const F threshold = Mul(uniform, table_.Width(k[i]));
      up |= uint64_t{LessBits(threshold, distance[i])} << (i * kWidth);
    }
    return up;
  }

  const PackLevels args_;
  const Digits& digits_;
  const RandomStream stream_;
  const RoundKeys keys_;
  CutReader<kDecided> x_;
  TableToRoundTo<kFew> table_;
  UndecidedOfTile<kTile> undecided_;
  int64_t lower_of_ = -1;  // The first element of the tile with these lower bits.
  uint16_t lower_[kTile + kDecided];
  uint8_t upper_[kTile + kDrawn];
  int32_t codes_[kTile + kDecided];
};

template <bool kFew>
void PackTiles(const PackLevels& args, const Digits& digits, int64_t begin,
               int64_t end) {
  LevelTiles<kFew> tiles(args, digits);
  for (int64_t tile = begin; tile < end; ++tile) tiles.Pack(tile);
}

void Kernel(const Parallel& parallel, const PackLevels& args) {
  const Digits digits(args.count - (args.stream == nullptr));
  const int64_t elements = GroupTile(digits) * digits.count();
  For(parallel, CeilDiv(args.size, elements), 4 * elements,
      [&](int64_t begin, int64_t end) {
        if (args.count <= kFewLevels) {
          PackTiles<true>(args, digits, begin, end);
        } else {
          PackTiles<false>(args, digits, begin, end);
        }
      });
}

// Looks up the levels of one worker's codes, of the elements from `first` to `last`.
template <bool kFew>
void LookUpTile(const MeanOfLevels& args, int64_t worker, const int32_t* codes,
                int64_t first, int64_t last, float* values) {
  float few[kFewLevels] = {};
  EachBlockOf(args.row_splits, args.num_blocks, first, last,
              [&](int64_t block, int64_t from, int64_t to) {
                const int64_t row = worker * args.num_blocks + block;
                const float* table =
                    TableOf<kFew>(args.levels + row * args.count, args.count, few);
                for (int64_t at = from - first; at < to - first; at += kWidth) {
                  Store(values + at, LookUp<kFew>(table, LoadInts(codes + at)));
                }
              });
}

// A tile: elements [first, last), in `size` words from `word` on.
struct Tile {
  int64_t first, last, word, size;
};

// Adds the levels of some workers in turn; the sums begin with the first worker's.
// Returns the number of workers. Codes stay in registers.
template <int Rows>
int AddLevels(const MeanOfLevels& args, const Digits& digits, const Tile& tile,
              int64_t worker, float* sums) {
  float halves[Rows][kTile + kSlack];
  for (int row = 0; row < Rows; ++row) {
    const int64_t place = (worker + row) * WordsFor(args.size, args.count) + tile.word;
    digits.Halve(args.words + place, tile.size, halves[row]);
  }
  const auto add = [&](int64_t block, int64_t from, int64_t to) {
    float few[Rows][kFewLevels] = {};
    for (int row = 0; row < Rows; ++row) {
      const int64_t table = (worker + row) * args.num_blocks + block;
      TableOf<true>(args.levels + table * args.count, args.count, few[row]);
    }
    // The vectors at both ends may have elements of other blocks, which are kept.
    const int64_t begin = (from - tile.first) / kWidth * kWidth, end = to - tile.first;
    float before[kWidth], after[kWidth];
    memcpy(before, sums + begin, sizeof(before));
    memcpy(after, sums + end, sizeof(after));
    digits.EachVector<Rows>(halves, begin / kWidth, CeilDiv(end, kWidth),
                            [&](int64_t v, const I(&codes)[Rows]) {
                              F sum = PickOf16(few[0], codes[0]);
                              if (worker > 0) sum = Add(Load(sums + v * kWidth), sum);
                              for (int row = 1; row < Rows; ++row) {
                                sum = Add(sum, PickOf16(few[row], codes[row]));
                              }
                              Store(sums + v * kWidth, sum);
                            });
    memcpy(sums + begin, before, (from - tile.first - begin) * sizeof(float));
    memcpy(sums + end, after, sizeof(after));
  };
  EachBlockOf(args.row_splits, args.num_blocks, tile.first, tile.last, add);
  return Rows;
}

template <bool kFew>
void MeanTiles(const MeanOfLevels& shared, const Digits& digits, int64_t begin,
               int64_t end) {
  // A copy, because a vector store may alias an object that others can see.
  const MeanOfLevels args = shared;
  const int64_t tile = GroupTile(digits), elements = tile * digits.count();
  const int64_t words = WordsFor(args.size, args.count);
  const DivideBy divide(args.num_workers);
  ValueWriter values(args.values, args.update, args.size);
  int32_t codes[kTile + kSlack] = {};  // Each code is a place in a table.
  float sum[kTile + kSlack] = {}, next[kTile + kSlack];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * elements, word = unit * tile;
    const int64_t last = Smaller(args.size, first + elements);
    const int64_t size = Smaller(tile, words - word);
    const Tile own = {first, last, word, size};
    for (int64_t worker = 0; worker < args.num_workers;) {
      if (kFew && digits.HasVectors()) {
        const int64_t left = args.num_workers - worker;
        if (left >= 4) {
          worker += AddLevels<4>(args, digits, own, worker, sum);
        } else if (left >= 2) {
          worker += AddLevels<2>(args, digits, own, worker, sum);
        } else {
          worker += AddLevels<1>(args, digits, own, worker, sum);
        }
        continue;
      }
      digits.Sum(args.words + worker * words + word, 1, 0, size, codes);
      LookUpTile<kFew>(args, worker, codes, first, last, worker == 0 ? sum : next);
      for (int64_t at = 0; worker > 0 && at < last - first; at += kWidth) {
        Store(sum + at, Add(Load(sum + at), Load(next + at)));
      }
      ++worker;
    }
    for (int64_t at = first; at < last; at += kGroup) {
      F mean[kParts];
      LoadGroup(sum + (at - first), mean);
      for (F& part : mean) part = divide(part);
      values.Put(at, mean);
    }
  }
}

void Kernel(const Parallel& parallel, const MeanOfLevels& args) {
  const Digits digits(args.count);
  const int64_t elements = GroupTile(digits) * digits.count();
  For(parallel, CeilDiv(args.size, elements), 4 * elements * (1 + args.num_workers),
      [&](int64_t begin, int64_t end) {
        if (args.count <= kFewLevels) {
          MeanTiles<true>(args, digits, begin, end);
        } else {
          MeanTiles<false>(args, digits, begin, end);
        }
      });
}
