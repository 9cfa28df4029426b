// Levels of blocks: found in a block's sorted elements, rounded to, and looked up.

// -- Sorting ----------------------------------------------------------------------

// Keys, whose order as integers is that of the numbers with these bits.
inline uint32_t KeyOf(uint32_t bits) {
  return bits ^ (bits >> 31 ? ~uint32_t{0} : uint32_t{1} << 31);
}
inline uint32_t BitsOfKey(uint32_t key) {
  return key ^ (key >> 31 ? uint32_t{1} << 31 : ~uint32_t{0});
}

// Up to here it takes less time than a radix sort's counters.
constexpr int64_t kInserted = 64;

void InsertionSort(uint32_t* keys, int64_t size) {
  for (int64_t i = 1; i < size; ++i) {
    const uint32_t key = keys[i];
    int64_t j = i;
    for (; j > 0 && keys[j - 1] > key; --j) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

// Sorts by one byte after the other, from the lowest on. Returns the buffer that the
// keys are left in: `keys` or `other`.
uint32_t* RadixSort(uint32_t* keys, uint32_t* other, int64_t size) {
  constexpr int kBytes = 4, kValues = 256;
  int64_t counts[kBytes][kValues] = {};
  for (int64_t i = 0; i < size; ++i) {
    for (int byte = 0; byte < kBytes; ++byte) ++counts[byte][keys[i] >> 8 * byte & 255];
  }
  for (int byte = 0; byte < kBytes; ++byte) {
    const int shift = 8 * byte;
    if (counts[byte][keys[0] >> shift & 255] == size) continue;
    // The keys of a value go from its first place upwards and from its last downwards:
    // two chains of dependent counters, which take the time of one.
    int64_t first[kValues], end[kValues], total = 0;
    for (int value = 0; value < kValues; ++value) {
      first[value] = total;
      end[value] = total += counts[byte][value];
    }
    int64_t i = 0, j = size;
    for (; i + 1 < j; ++i) {
      const uint32_t low = keys[i], high = keys[--j];
      other[first[low >> shift & 255]++] = low;
      other[--end[high >> shift & 255]] = high;
    }
    if (i < j) other[first[keys[i] >> shift & 255]] = keys[i];
    uint32_t* const sorted = other;
    other = keys;
    keys = sorted;
  }
  return keys;
}

// -- Finding ----------------------------------------------------------------------

// Finds the levels of one block after the other.
class LevelFinder {
 public:
  explicit LevelFinder(const FindLevels& args)
      : args_(args), x_(args.x, args.size), index_(new int64_t[args.count]) {}
  ~LevelFinder() {
    delete[] index_;
    Release();
  }
  LevelFinder(const LevelFinder&) = delete;
  LevelFinder& operator=(const LevelFinder&) = delete;

  // Writes them; returns the number of elements that are infinite or NaN.
  int64_t Find(int64_t block) {
    const int64_t begin = args_.row_splits[block], end = args_.row_splits[block + 1];
    float* const levels = args_.levels + block * args_.count;
    Read(begin, end);
    if (largest_ >= kInfinity) {
      for (int64_t k = 0; k < args_.count; ++k) levels[k] = 0;
      return CountNonfinite();
    }
    if (args_.rule == LevelRule::kMeans) {
      FixPoints();
      Means(levels);
      return 0;
    }
    Sort();
    FixPoints();
    switch (args_.rule) {
      case LevelRule::kOptimal:
        Optimal();
        break;
      case LevelRule::kQuantiles:
        Quantiles();
        break;
      default:
        index_[0] = index_[1] = Symmetric();
    }
    for (int64_t k = 0; k < args_.count; ++k) {
      levels[k] = FloatOf(BitsOfKey(keys_[index_[k]]));
    }
    if (args_.rule == LevelRule::kSymmetric) {
      // No arithmetic: it may take a denormal for zero.
      const uint32_t bits = BitsOf(levels[1]);
      levels[0] = FloatOf(bits == 0 ? 0 : bits | ~kMagnitude);
    }
    return 0;
  }

 private:
  static constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;
  // Elements of a sum of `sums_`.
  static constexpr int64_t kRun = 64;

  void Release() {
    delete[] keys_;
    delete[] spare_;
    delete[] sums_;
  }

  // Makes room for `size` elements.
  void Reserve(int64_t size) {
    if (size > room_) {
      Release();
      room_ = size;
      keys_ = new uint32_t[room_];
      spare_ = new uint32_t[room_];
      sums_ = new int64_t[room_ / kRun + 1];
    }
    size_ = size;
  }

  // The keys of a block's elements, or of their magnitudes, and the largest magnitude.
  void Read(int64_t begin, int64_t end) {
    Reserve(end - begin);
    const uint32_t kept =
        args_.rule == LevelRule::kSymmetric ? kMagnitude : ~uint32_t{0};
    x_.Copy(begin, end, reinterpret_cast<float*>(keys_));
    uint32_t largest = 0;
    for (int64_t i = 0; i < size_; ++i) {
      uint32_t bits;
      memcpy(&bits, keys_ + i, sizeof(bits));
      const uint32_t magnitude = bits & kMagnitude;
      largest = largest < magnitude ? magnitude : largest;
      keys_[i] = KeyOf(magnitude == 0 ? 0 : bits & kept);
    }
    largest_ = largest;
  }

  // Of the block that was read and not sorted yet.
  int64_t CountNonfinite() const {
    int64_t nonfinite = 0;
    for (int64_t i = 0; i < size_; ++i) {
      nonfinite += (BitsOfKey(keys_[i]) & kMagnitude) >= kInfinity;
    }
    return nonfinite;
  }

  void Sort() {
    if (size_ <= kInserted) return InsertionSort(keys_, size_);
    uint32_t* const sorted = RadixSort(keys_, spare_, size_);
    if (sorted == keys_) return;
    spare_ = keys_;
    keys_ = sorted;
  }

  static double PowerOfTwo(int exponent) {
    const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
  int Top() const { return static_cast<int>(largest_ >> 23); }

  // Puts q of each key into the spare buffer, and the sums of runs before each run.
  void FixPoints() {
    const double scale = PowerOfTwo(156 - Top());
    const uint32_t* const keys = keys_;
    uint32_t* const q = spare_;
    for (int64_t i = 0; i < size_; ++i) {
      const uint32_t bits = BitsOfKey(keys[i]);
      // 1.5 * 2^52 + n, rounded as all sums are, holds the integer n in its low bits.
      const double shifted =
          static_cast<double>(FloatOf(bits & kInfinity ? bits : 0)) * scale +
          6755399441055744.0;
      uint64_t fixed;
      memcpy(&fixed, &shifted, sizeof(fixed));
      q[i] = static_cast<uint32_t>(fixed);
    }
    int64_t total = 0;
    for (int64_t run = 0; run < size_ / kRun; ++run) {
      sums_[run] = total;
      int64_t sum = 0;
      for (int64_t i = run * kRun; i < (run + 1) * kRun; ++i) sum += Q(i);
      total += sum;
    }
    sums_[size_ / kRun] = total;
  }

  int64_t Q(int64_t i) const { return static_cast<int32_t>(spare_[i]); }

  // The sum of q of the first `count` elements.
  int64_t Total(int64_t count) const {
    int64_t total = sums_[count / kRun];
    for (int64_t i = count / kRun * kRun; i < count; ++i) total += Q(i);
    return total;
  }

  int64_t Middle(int64_t left, int64_t right) const {
    const int64_t low = Q(left), width = Q(right) - low;
    if (width == 0) return right;
    const int64_t over = Total(right + 1) - Total(left) - (right - left + 1) * low;
    const int64_t rank = (over + width - 1) / width;
    return right + 1 - (rank > 1 ? rank : 1);
  }

  void Optimal() {
    const int64_t last = args_.count - 1;
    index_[0] = 0;
    index_[last] = size_ - 1;
    for (int64_t step = last; step > 1; step /= 2) {
      for (int64_t left = 0; left < last; left += step) {
        index_[left + step / 2] = Middle(index_[left], index_[left + step]);
      }
    }
    for (int64_t sweep = 0; sweep < args_.sweeps; ++sweep) {
      for (int64_t k = 1; k < last; ++k) {
        index_[k] = Middle(index_[k - 1], index_[k + 1]);
      }
    }
  }

  void Quantiles() {
    const int64_t last = args_.count - 1;
    for (int64_t k = 0; k <= last; ++k) {
      index_[k] = (2 * k * (size_ - 1) + last) / (2 * last);
    }
  }

  int64_t Symmetric() const {
    int64_t above = 0, index = 0, least = INT64_MAX;
    for (int64_t i = size_ - 1; i >= 0; --i) {
      above += Q(i);
      // Of equal elements the first one has all of them above or beside it.
      if (i > 0 && keys_[i - 1] == keys_[i]) continue;
      const int64_t difference = size_ * Q(i) - above;
      const int64_t distance = difference < 0 ? -difference : difference;
      if (distance <= least) {
        least = distance;
        index = i;
      }
    }
    return index;
  }

  float Mean(int64_t total, int64_t count) const {
    const double mean = static_cast<double>(total) / static_cast<double>(count) *
                        PowerOfTwo(Top() - 156);
    const double smallest = PowerOfTwo(-126);
    return mean < smallest && mean > -smallest ? 0 : static_cast<float>(mean);
  }

  void Means(float* levels) const {
    const int64_t total = Total(size_);
    const float middle = Mean(total, size_);
    const uint32_t edge = KeyOf(BitsOf(middle));
    int64_t below = 0, number = 0;
    for (int64_t i = 0; i < size_; ++i) {
      below += keys_[i] < edge ? Q(i) : 0;
      number += keys_[i] < edge;
    }
    levels[0] = number > 0 ? Mean(below, number) : middle;
    levels[1] = middle;
    levels[2] = number < size_ ? Mean(total - below, size_ - number) : middle;
  }

  const FindLevels args_;
  CutReader<kGroup> x_;
  int64_t* index_;  // [count]
  uint32_t *keys_ = nullptr, *spare_ = nullptr;
  int64_t* sums_ = nullptr;
  int64_t room_ = 0, size_ = 0;
  uint32_t largest_ = 0;
};

void Kernel(const Parallel& parallel, const FindLevels& args) {
  *args.nonfinite = 0;
  const int64_t width = args.size / (args.num_blocks > 0 ? args.num_blocks : 1);
  // A sort takes about as long as moving this much.
  For(parallel, args.num_blocks, 24 * width, [&](int64_t begin, int64_t end) {
    LevelFinder finder(args);
    int64_t nonfinite = 0;
    for (int64_t block = begin; block < end; ++block) nonfinite += finder.Find(block);
    AddCount(args.nonfinite, nonfinite);
  });
}

// -- Rounding and looking up ------------------------------------------------------

// So many levels are looked up in registers.
constexpr int64_t kFewLevels = 16;

template <bool kFew>
inline F LookUp(const float* table, I codes) {
  return kFew ? PickOf16(table, codes) : Gather(table, codes);
}

// The table of a block's levels; few are copied to where sixteen can be read.
template <bool kFew>
inline const float* TableOf(const float* levels, int64_t count, float* buffer) {
  if (!kFew) return levels;
  memcpy(buffer, levels, count * sizeof(float));
  return buffer;
}

// Calls piece(block, from, to) for what each block has of [begin, end). A piece may be
// worked on by groups that begin with it and end beyond it, in order: what a group
// writes past its piece the next one overwrites.
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

// Codes of a group: k and, where `random` is given, what is drawn.
template <bool kFew>
inline __attribute__((always_inline)) void CodeGroup(const float* x, const float* table,
                                                     int64_t count,
                                                     const uint32_t* random,
                                                     int32_t* codes) {
  F value[kParts];
  I k[kParts];
  LoadGroup(x, value);
  for (int part = 0; part < kParts; ++part) k[part] = SetInts(0);
  for (int64_t inner = 1; inner < count - 1; ++inner) {
    const F level = Set(table[inner]);
    EachPart([&](auto part) {
      k[part.kPart] = AddAtMost(k[part.kPart], level, value[part.kPart]);
    });
  }
  EachPart([&](auto part) {
    constexpr int kPart = part.kPart, kFirst = kPart * kWidth;
    if (random != nullptr) {
      const F low = LookUp<kFew>(table, k[kPart]);
      const F high = LookUp<kFew>(table + 1, k[kPart]);
      k[kPart] = AddLess(k[kPart], Mul(Uniforms(random + kFirst), Sub(high, low)),
                         Sub(value[kPart], low));
    }
    StoreInts(codes + kFirst, k[kPart]);
  });
}

// A tile of whole words and whole groups.
inline int64_t GroupTile(const Digits& digits) {
  return kGroup * (kTile / kGroup / digits.count());
}

template <bool kFew>
void PackTiles(const PackLevels& shared, const Digits& digits, int64_t begin,
               int64_t end) {
  const PackLevels args = shared;  // A vector store may alias what others can see.
  const int64_t tile = GroupTile(digits), elements = tile * digits.count();
  const bool draws = args.stream != nullptr;
  const RoundKeys keys(draws ? ToStream(args.stream) : RandomStream{});
  constexpr int64_t kDrawn = kRandomGroups * kGroup;
  uint32_t random[kTile + kDrawn] = {};
  int32_t codes[kTile + kSlack];
  float few[kFewLevels + 1] = {};  // Sixteen can be read from the second one on, too.
  CutReader<kGroup> x(args.x, args.size);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * elements;
    const int64_t last = Smaller(args.size, first + elements);
    for (int64_t at = first; at < last; at += kDrawn) {
      if (draws) {
        RandomWords<kRandomGroups>(keys, static_cast<uint64_t>(at) / 4,
                                   random + (at - first));
      }
      // Meanwhile the memory has time.
      for (int64_t line = 0; line < kDrawn; line += 16) x.Prefetch(at + line);
    }
    EachBlockOf(args.row_splits, args.num_blocks, first, last,
                [&](int64_t block, int64_t from, int64_t to) {
                  const float* levels = args.levels + block * args.count;
                  const float* table = TableOf<kFew>(levels, args.count, few);
                  for (int64_t at = from; at < to; at += kGroup) {
                    const float* p = x.At(at, Smaller(kGroup, args.size - at));
                    CodeGroup<kFew>(p, table, args.count,
                                    draws ? random + (at - first) : nullptr,
                                    codes + (at - first));
                  }
                });
    digits.Pack(codes, last - first, kTile + kSlack, args.words + unit * tile);
  }
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

// What the codes of one worker stand for, from element `first` on.
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

template <bool kFew>
void MeanTiles(const MeanOfLevels& shared, const Digits& digits, int64_t begin,
               int64_t end) {
  const MeanOfLevels args = shared;  // A vector store may alias what others can see.
  const int64_t tile = GroupTile(digits), elements = tile * digits.count();
  const int64_t words = WordsFor(args.size, args.count);
  const DivideBy divide(args.num_workers);
  GroupWriter values(args.values, args.size);
  int32_t codes[kTile + kSlack] = {};  // Each of them is a place in a table.
  float sum[kTile + kSlack], next[kTile + kSlack];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * elements;
    const int64_t last = Smaller(args.size, first + elements);
    for (int64_t worker = 0; worker < args.num_workers; ++worker) {
      digits.Sum(args.words + worker * words + unit * tile, 1, 0,
                 Smaller(tile, words - unit * tile), codes);
      LookUpTile<kFew>(args, worker, codes, first, last, worker == 0 ? sum : next);
      for (int64_t at = 0; worker > 0 && at < last - first; at += kWidth) {
        Store(sum + at, Add(Load(sum + at), Load(next + at)));
      }
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
