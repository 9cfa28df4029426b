// Levels of blocks, found by sums and places: a rule needs the sums of a range of
// elements and the element at the place that follows from them.

// Finds the levels of one block after the other.
class LevelFinder {
 public:
  explicit LevelFinder(const FindLevels& args)
      : args_(args), block_(args.x, args.size), levels_(new Level[args.count]) {}
  ~LevelFinder() { delete[] levels_; }
  LevelFinder(const LevelFinder&) = delete;
  LevelFinder& operator=(const LevelFinder&) = delete;

  // Writes the levels of a block. Returns the number of its elements that are infinite
  // or NaN.
  int64_t Find(int64_t block) {
    float* const levels = args_.levels + block * args_.count;
    block_.Read(args_.row_splits[block], args_.row_splits[block + 1],
                args_.rule == LevelRule::kSymmetric);
    if (!block_.IsFinite()) {
      for (int64_t k = 0; k < args_.count; ++k) levels[k] = 0;
      return block_.CountNonfinite();
    }
    if (args_.rule == LevelRule::kMeans) {
      Means(levels);
      return 0;
    }
    block_.Count(args_.count);
    switch (args_.rule) {
      case LevelRule::kOptimal:
        Optimal();
        break;
      case LevelRule::kQuantiles:
        Quantiles();
        break;
      default:
        levels_[1].key = Symmetric();
        levels_[0].key = -levels_[1].key;
    }
    for (int64_t k = 0; k < args_.count; ++k) levels[k] = NumberOfKey(levels_[k].key);
    return 0;
  }

 private:
  // A level is an element. The first level's place is -1 and the last one's the block's
  // size: all elements are between them.
  using Level = SortedBlock::Element;

  // Finds a level between two others, by its place.
  void Take(const Level& left, const Level& right, int64_t place, Level* level) {
    if (place <= left.place) {
      *level = left;
    } else if (place >= right.place) {
      *level = right;
    } else {
      *level = block_.At(place);
    }
  }

  // The place of the middle of a and b: as many before that of b as the sum of
  // (v - a) / (b - a) over the elements v between them, rounded up.
  static int64_t MiddleOf(const Level& left, const Level& right) {
    const int64_t width = right.q - left.q;
    if (width == 0) return right.place;
    const int64_t sum = right.before - (left.before + left.q);
    const int64_t number = right.place - left.place - 1;
    return right.place - CeilDiv(sum - number * left.q, width);
  }

  void SetEnds() {
    const int32_t smallest = block_.smallest(), largest = block_.largest();
    const int64_t size = block_.size(), q = block_.Q(smallest);
    // With -q, the sum of the elements up to the first level is 0.
    levels_[0] = {-1, 0, smallest, q, -q};
    levels_[args_.count - 1] = {size, size, largest, block_.Q(largest), block_.total()};
  }

  void Optimal() {
    SetEnds();
    const int64_t last = args_.count - 1;
    SetMiddles(0, last);
    for (int64_t sweep = 0; sweep < args_.sweeps; ++sweep) {
      for (int64_t k = 1; k < last; ++k) SetMiddle(k - 1, k, k + 1);
    }
  }

  void SetMiddle(int64_t first, int64_t k, int64_t last) {
    const Level &left = levels_[first], &right = levels_[last];
    Take(left, right, MiddleOf(left, right), levels_ + k);
  }

  // Sets the levels between two others.
  void SetMiddles(int64_t first, int64_t last) {
    if (last - first < 2) return;
    const int64_t k = first + (last - first) / 2;
    SetMiddle(first, k, last);
    SetMiddles(first, k);
    SetMiddles(k, last);
  }

  void Quantiles() {
    SetEnds();
    const int64_t last = block_.size() - 1, count = args_.count - 1;
    for (int64_t k = 1; k < count; ++k) {
      Take(levels_[0], levels_[count], (2 * k * last + count) / (2 * count),
           levels_ + k);
    }
  }

  // size * q less the sum of the elements as large or larger rises from element to
  // element. Halving finds where it stops being negative, and at which of the two
  // elements there it is nearer to 0.
  int32_t Symmetric() {
    int64_t begin = 0, end = block_.size();
    int32_t low = block_.smallest(), high = block_.largest();
    int64_t low_excess = -INT64_MAX, high_excess = INT64_MAX;
    while (begin < end) {
      const Level level = block_.At(begin + (end - begin) / 2);
      // Equal elements count together.
      const int64_t below = level.before - (level.place - level.first) * level.q;
      const int64_t excess = block_.size() * level.q - (block_.total() - below);
      if (excess < 0) {
        low = level.key;
        low_excess = excess;
        begin = level.place + 1;
      } else {
        high = level.key;
        high_excess = excess;
        end = level.first;
      }
    }
    // All elements with q = 0 are equally near: the smallest is taken.
    if (block_.Q(low) == 0) low = block_.smallest();
    return -low_excess <= high_excess ? low : high;
  }

  void Means(float* levels) {
    int64_t size, number;
    const int64_t total = block_.SumBelow(INT32_MAX, &size);
    const float middle = block_.Mean(total, size);
    const int64_t below = block_.SumBelow(KeyOfNumber(middle), &number);
    levels[0] = number > 0 ? block_.Mean(below, number) : middle;
    levels[1] = middle;
    levels[2] = number < size ? block_.Mean(total - below, size - number) : middle;
  }

  const FindLevels args_;
  SortedBlock block_;
  Level* levels_;  // [count]
};

void Kernel(const Parallel& parallel, const FindLevels& args) {
  CountByBlock(parallel, args, &LevelFinder::Find);
}
