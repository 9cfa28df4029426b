// Levels of blocks, found by sums and selections.
//
// No block is sorted. A rule needs the sums of a range of elements and the element of a
// rank that follows from them, and each selection leaves the elements divided there, so
// that the next ones look at their own range only. Sums are of integers, so their order
// does not matter.

// Finds the levels of one block after the other.
class LevelFinder {
 public:
  explicit LevelFinder(const FindLevels& args)
      : args_(args), x_(args.x, args.size), levels_(new Level[args.count]) {}
  ~LevelFinder() {
    delete[] levels_;
    Release();
  }
  LevelFinder(const LevelFinder&) = delete;
  LevelFinder& operator=(const LevelFinder&) = delete;

  // Writes the levels of a block. Returns the number of its elements that are infinite
  // or NaN.
  int64_t Find(int64_t block) {
    float* const levels = args_.levels + block * args_.count;
    Read(args_.row_splits[block], args_.row_splits[block + 1]);
    if (top_ == kInfinite) {
      for (int64_t k = 0; k < args_.count; ++k) levels[k] = 0;
      return CountNonfinite();
    }
    switch (args_.rule) {
      case LevelRule::kOptimal:
        Optimal();
        break;
      case LevelRule::kQuantiles:
        Quantiles();
        break;
      case LevelRule::kSymmetric:
        levels_[1].key = Symmetric();
        levels_[0].key = -levels_[1].key;
        break;
      case LevelRule::kMeans:
        Means(levels);
        return 0;
    }
    for (int64_t k = 0; k < args_.count; ++k) levels[k] = NumberOf(levels_[k].key);
    return 0;
  }

 private:
  // A level that is an element, and its place if the block were sorted. The elements
  // before and behind that place have been put there. The first level's place is -1 and
  // the last one's the block's size: all elements are between them.
  struct Level {
    int64_t place;
    int32_t key;
  };
  static constexpr int kInfinite = 255;

  void Release() {
    delete[] keys_;
    delete[] spare_;
  }

  // Makes room for `size` elements.
  void Reserve(int64_t size) {
    if (size > room_) {
      Release();
      room_ = size;
      keys_ = new int32_t[room_ + kWidth];
      spare_ = new int32_t[room_ + kWidth];
    }
    size_ = size;
  }

  static int ExponentOf(int32_t key) { return (key < 0 ? -key : key) >> 23; }
  static float NumberOf(int32_t key) {
    // The sign is set without arithmetic, which may flush a denormal to zero.
    const uint32_t bits = static_cast<uint32_t>(key);
    return FloatOf(key < 0 ? (0 - bits) | uint32_t{1} << 31 : bits);
  }

  // Reads the keys of a block's elements, or of their magnitudes.
  void Read(int64_t begin, int64_t end) {
    Reserve(end - begin);
    x_.Copy(begin, end, reinterpret_cast<float*>(keys_));
    // The last vector is filled up.
    for (int64_t i = 0; i < kWidth; ++i) memcpy(keys_ + size_ + i, keys_, 4);
    const int32_t kept = args_.rule == LevelRule::kSymmetric ? INT32_MAX : -1;
    I smallest = SetInts(INT32_MAX), largest = SetInts(INT32_MIN);
    for (int64_t at = 0; at < size_; at += kWidth) {
      const I keys = KeysOf(And(LoadInts(keys_ + at), SetInts(kept)));
      smallest = MinInts(smallest, keys);
      largest = MaxInts(largest, keys);
      StoreInts(keys_ + at, keys);
    }
    smallest_ = OverLanes(smallest, SmallerKey);
    largest_ = OverLanes(largest, LargerKey);
    top_ = LargerKey(ExponentOf(smallest_), ExponentOf(largest_));
    // The scale of q, 2^(156 - top), is no float32, but its two factors are.
    const int power = 156 - top_;
    scale_ = FloatOf(static_cast<uint32_t>(127 + power / 2) << 23);
    other_scale_ = FloatOf(static_cast<uint32_t>(127 + power - power / 2) << 23);
  }

  int64_t CountNonfinite() const {
    int64_t nonfinite = 0;
    for (int64_t i = 0; i < size_; ++i) nonfinite += ExponentOf(keys_[i]) == kInfinite;
    return nonfinite;
  }

  // -- Integers q for sums, of which the largest magnitude has 30 bits -----------------

  I FixedPoints(I keys) const {
    return RoundNormal(NumbersOf(keys), Set(scale_), Set(other_scale_));
  }

  int64_t Q(int32_t key) const {
    int32_t lanes[kWidth];
    StoreInts(lanes, FixedPoints(SetInts(key)));
    return lanes[0];
  }

  // The sum of q over a range of keys.
  int64_t Sum(int64_t begin, int64_t end) const {
    // So many integers of 31 bits are added in float64 without rounding.
    constexpr int64_t kExact = int64_t{1} << 16;
    int64_t total = 0;
    for (int64_t first = begin; first < end; first += kExact) {
      const int64_t last = Smaller(end, first + kExact);
      D sum = SetDoubles(0);
      int64_t at = first;
      for (; at + kWidth <= last; at += kWidth) {
        sum = AddWide(sum, FixedPoints(LoadInts(keys_ + at)));
      }
      const I rest = FixedPoints(LoadInts(keys_ + at));
      sum = AddWide(sum, KeepWhere(LowBits(last - at), rest));
      total += static_cast<int64_t>(SumLanes(sum));
    }
    return total;
  }

  float Mean(int64_t total, int64_t count) const {
    const double mean = static_cast<double>(total) / static_cast<double>(count) *
                        PowerOfTwo(top_ - 156);
    const double smallest = PowerOfTwo(-126);
    return mean < smallest && mean > -smallest ? 0 : static_cast<float>(mean);
  }

  static double PowerOfTwo(int exponent) {
    const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // -- The rules -----------------------------------------------------------------------

  // Sets level k, which is at `place`, between two others.
  void SetBetween(const Level& left, const Level& right, int64_t place, Level* level) {
    if (place <= left.place) {
      *level = left;
    } else if (place >= right.place) {
      *level = right;
    } else {
      *level = {place, Select(keys_, left.place + 1, right.place, place, spare_)};
    }
  }

  // Sets the level in the middle of two others: as many places before the right one as
  // the elements v between a and b have a sum of (v - a) / (b - a), rounded up.
  void SetMiddle(const Level& left, const Level& right, Level* level) {
    const int64_t low = Q(left.key), width = Q(right.key) - low;
    int64_t places = 0;
    if (width > 0) {
      const int64_t begin = left.place + 1, end = right.place;
      places = CeilDiv(Sum(begin, end) - (end - begin) * low, width);
    }
    SetBetween(left, right, right.place - places, level);
  }

  void SetEnds() {
    levels_[0] = {-1, smallest_};
    levels_[args_.count - 1] = {size_, largest_};
  }

  void Optimal() {
    SetEnds();
    const int64_t last = args_.count - 1;
    for (int64_t step = last; step > 1; step /= 2) {
      for (int64_t k = 0; k < last; k += step) {
        SetMiddle(levels_[k], levels_[k + step], levels_ + k + step / 2);
      }
    }
    for (int64_t sweep = 0; sweep < args_.sweeps; ++sweep) {
      for (int64_t k = 1; k < last; ++k) {
        SetMiddle(levels_[k - 1], levels_[k + 1], levels_ + k);
      }
    }
  }

  void Quantiles() {
    SetEnds();
    SetQuantiles(0, args_.count - 1);
  }

  // Sets the quantiles between two levels.
  void SetQuantiles(int64_t left, int64_t right) {
    if (right - left < 2) return;
    const int64_t k = left + (right - left) / 2, last = args_.count - 1;
    SetBetween(levels_[left], levels_[right], (2 * k * (size_ - 1) + last) / (2 * last),
               levels_ + k);
    SetQuantiles(left, k);
    SetQuantiles(k, right);
  }

  // size * q less the sum of the elements as large or larger rises from element to
  // element. Halving finds where it stops being negative, and at which of the two
  // elements there it is nearer to 0.
  int32_t Symmetric() {
    int64_t begin = 0, end = size_, above = 0;  // `above` is the sum from `end` on.
    int32_t low = smallest_, high = largest_;
    int64_t low_excess = INT64_MIN, high_excess = INT64_MAX;
    while (begin < end) {
      int64_t middle = begin + (end - begin) / 2;
      const int32_t key = Select(keys_, begin, end, middle, spare_);
      // Equal elements count together.
      middle = Divide(keys_, begin, middle, key, spare_);
      const int64_t sum = above + Sum(middle, end);
      const int64_t excess = size_ * Q(key) - sum;
      if (excess < 0) {
        low = key;
        low_excess = excess;
        begin = Divide(keys_, middle, end, key + 1, spare_);
      } else {
        high = key;
        high_excess = excess;
        end = middle;
        above = sum;
      }
    }
    // All elements with q = 0 are equally near: the smallest is taken.
    if (Q(low) == 0) low = smallest_;
    return -low_excess <= high_excess ? low : high;
  }

  void Means(float* levels) {
    const int64_t total = Sum(0, size_);
    const float middle = Mean(total, size_);
    uint32_t bits;
    memcpy(&bits, &middle, sizeof(bits));
    int32_t keys[kWidth];
    StoreInts(keys, KeysOf(SetInts(static_cast<int32_t>(bits))));
    const int64_t number = Divide(keys_, 0, size_, keys[0], spare_);
    const int64_t below = Sum(0, number);
    levels[0] = number > 0 ? Mean(below, number) : middle;
    levels[1] = middle;
    levels[2] = number < size_ ? Mean(total - below, size_ - number) : middle;
  }

  const FindLevels args_;
  CutReader<kGroup> x_;
  Level* levels_;  // [count]
  int32_t *keys_ = nullptr, *spare_ = nullptr;
  int64_t room_ = 0, size_ = 0;
  int32_t smallest_ = 0, largest_ = 0;
  int top_ = 0;  // The exponent of the largest magnitude.
  float scale_ = 0, other_scale_ = 0;
};

void Kernel(const Parallel& parallel, const FindLevels& args) {
  *args.nonfinite = 0;
  const int64_t width = args.size / (args.num_blocks > 0 ? args.num_blocks : 1);
  For(parallel, args.num_blocks, 8 * width, [&](int64_t begin, int64_t end) {
    LevelFinder finder(args);
    int64_t nonfinite = 0;
    for (int64_t block = begin; block < end; ++block) nonfinite += finder.Find(block);
    AddCount(args.nonfinite, nonfinite);
  });
}
