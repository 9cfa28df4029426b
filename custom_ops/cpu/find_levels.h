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
    for (int64_t k = 0; k < args_.count; ++k) levels[k] = NumberOfKey(levels_[k].key);
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
      keys_ = new int32_t[room_ + kSample];
      spare_ = new int32_t[room_ + kSample];
    }
    size_ = size;
  }

  static int ExponentOf(int32_t key) { return (key < 0 ? -key : key) >> 23; }

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

  // -- Integers q for sums ----------------------------------------------------------
  // The largest magnitude has 30 bits.

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
    return MeanOfFixed(total, count, top_);
  }

  // -- The rules --------------------------------------------------------------------

  // Finds a level between two others, by its place. `divides` says whether the elements
  // are then needed on either side of it.
  void Take(const Level& left, const Level& right, int64_t place, bool divides,
            Level* level) {
    if (place <= left.place) {
      *level = left;
    } else if (place >= right.place) {
      *level = right;
    } else {
      const int64_t begin = left.place + 1, size = right.place - begin;
      *level = {place, Select(keys_ + begin, size, place - begin, left.key, right.key,
                              spare_)};
      if (divides) Divide(keys_ + begin, size, level->key, spare_);
    }
  }

  // The sum of q over the elements between two levels.
  int64_t SumBetween(const Level& left, const Level& right) const {
    return Sum(left.place + 1, right.place);
  }

  // The place of the middle of a and b: as many before that of b as the sum of
  // (v - a) / (b - a) over the elements v between them, rounded up.
  int64_t MiddleOf(const Level& left, const Level& right, int64_t sum) const {
    const int64_t low = Q(left.key), width = Q(right.key) - low;
    if (width == 0) return right.place;
    const int64_t number = right.place - left.place - 1;
    return right.place - CeilDiv(sum - number * low, width);
  }

  void SetEnds() {
    levels_[0] = {-1, smallest_};
    levels_[args_.count - 1] = {size_, largest_};
  }

  void Optimal() {
    SetEnds();
    const int64_t last = args_.count - 1;
    if (last > 1) SetMiddles(0, last, Sum(0, size_));
    for (int64_t sweep = 0; sweep < args_.sweeps; ++sweep) {
      for (int64_t k = 1; k < last; ++k) {
        const Level &left = levels_[k - 1], &right = levels_[k + 1];
        const int64_t place = MiddleOf(left, right, SumBetween(left, right));
        Take(left, right, place, true, levels_ + k);
      }
    }
  }

  // Sets the levels between two others. `sum` is that of the elements between these.
  void SetMiddles(int64_t first, int64_t last, int64_t sum) {
    const int64_t k = first + (last - first) / 2;
    const Level &left = levels_[first], &right = levels_[last];
    Level& middle = levels_[k];
    const bool is_leaf = k - first == 1;
    Take(left, right, MiddleOf(left, right, sum), !is_leaf || args_.sweeps > 0,
         &middle);
    if (is_leaf) return;
    int64_t below = sum, above = 0;
    if (middle.place < right.place) {
      below = SumBetween(left, middle);
      above = sum - below - Q(middle.key);
    }
    SetMiddles(first, k, below);
    SetMiddles(k, last, above);
  }

  void Quantiles() {
    SetEnds();
    SetQuantiles(0, args_.count - 1);
  }

  // Sets the quantiles between two levels.
  void SetQuantiles(int64_t first, int64_t last) {
    if (last - first < 2) return;
    const int64_t k = first + (last - first) / 2, count = args_.count - 1;
    Take(levels_[first], levels_[last], (2 * k * (size_ - 1) + count) / (2 * count),
         last - first > 2, levels_ + k);
    SetQuantiles(first, k);
    SetQuantiles(k, last);
  }

  // size * q less the sum of the elements as large or larger rises from element to
  // element. Halving finds where it stops being negative, and at which of the two
  // elements there it is nearer to 0.
  int32_t Symmetric() {
    int64_t begin = 0, end = size_, above = 0;  // `above` is the sum from `end` on.
    int32_t low = smallest_, high = largest_;
    int64_t low_excess = -INT64_MAX, high_excess = INT64_MAX;
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      const int32_t key =
          Select(keys_ + begin, end - begin, middle - begin, low, high, spare_);
      Divide(keys_ + begin, end - begin, key, spare_);
      // Equal elements count together.
      int64_t first = middle, last = middle + 1;
      while (first > begin && keys_[first - 1] == key) --first;
      while (last < end && keys_[last] == key) ++last;
      const int64_t sum = above + Sum(first, end);
      const int64_t excess = size_ * Q(key) - sum;
      if (excess < 0) {
        low = key;
        low_excess = excess;
        begin = last;
      } else {
        high = key;
        high_excess = excess;
        end = first;
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
    int64_t none;
    const int64_t number =
        Filter(keys_, size_, INT32_MIN, KeyOfNumber(middle) - 1, keys_, &none);
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
  CountByBlock(parallel, args, &LevelFinder::Find);
}
