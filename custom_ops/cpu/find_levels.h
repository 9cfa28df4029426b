// Levels of blocks, found in the sorted elements of each block.

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

  // Writes the levels of a block. Returns the number of its elements that are infinite
  // or NaN.
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
      // The sign is set without arithmetic, which may flush a denormal to zero.
      const uint32_t bits = BitsOf(levels[1]);
      levels[0] = FloatOf(bits == 0 ? 0 : bits | ~kMagnitude);
    }
    return 0;
  }

 private:
  // The number of elements in each sum of `sums_`.
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

  // Reads the keys of a block's elements, or of their magnitudes, and the largest
  // magnitude.
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

  // Counts the elements that are infinite or NaN in a block that is not sorted yet.
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

  int Top() const { return static_cast<int>(largest_ >> 23); }

  // Writes the fixed-point number q of each key to the spare buffer, and for each run
  // of kRun keys the sum of q over all runs before it to `sums_`.
  void FixPoints() {
    const double scale = FixedScale(Top());
    const uint32_t* const keys = keys_;
    uint32_t* const q = spare_;
    for (int64_t i = 0; i < size_; ++i) {
      q[i] = FixedPoint(BitsOfKey(keys[i]), scale);
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

  // Returns the sum of q over the first `count` elements.
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
      // Only the first of equal elements counts: `above` then includes all of them.
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
    return MeanOfFixed(total, count, Top());
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
  // A sort takes about as long as moving 24 bytes an element.
  For(parallel, args.num_blocks, 24 * width, [&](int64_t begin, int64_t end) {
    LevelFinder finder(args);
    int64_t nonfinite = 0;
    for (int64_t block = begin; block < end; ++block) nonfinite += finder.Find(block);
    AddCount(args.nonfinite, nonfinite);
  });
}
