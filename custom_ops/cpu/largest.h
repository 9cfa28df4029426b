// The largest elements of chunks, and the mean of such chunks.

// Returns the largest number that `count` of the numbers reach, or one that exactly
// `count` of them reach. None is negative.
inline int32_t ReachedBy(const int32_t* numbers, int64_t size, int64_t count) {
  int32_t least = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const int32_t higher = least | 1 << bit;
    int32_t reach = 0;
    for (int64_t i = 0; i < size; ++i) reach += numbers[i] >= higher;
    if (reach >= count) least = higher;
    if (reach == count) break;
  }
  return least;
}

// Packs one chunk after the other.
class LargestPacker {
 public:
  explicit LargestPacker(const PackLargest& args)
      : args_(args), format_(args), x_(args.x, args.size) {}
  ~LargestPacker() { Release(); }
  LargestPacker(const LargestPacker&) = delete;
  LargestPacker& operator=(const LargestPacker&) = delete;

  // Returns the number of the block's elements that are infinite or NaN.
  int64_t Pack(int64_t block) {
    const int64_t begin = args_.row_splits[block], end = args_.row_splits[block + 1];
    Read(begin, end);
    const int64_t count = format_.Share(size_);
    Select(count);
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = MaxOf(largest, magnitudes_[i]);
    const int top = largest >> 23;
    const bool is_finite = static_cast<uint32_t>(largest) < kInfinity;
    FixPoints(count, top, is_finite);
    const MagnitudeParts parts = Split(count);
    float* const levels = args_.levels + block * format_.levels;
    for (int level = 0; level < format_.levels; ++level) {
      const int part = parts.Filled(static_cast<int>(format_.levels) + level);
      levels[level] = MeanOfFixed(parts.total[part], parts.number[part], top);
    }
    uint32_t* const words = args_.words + block * format_.words;
    memset(words, 0, format_.words * sizeof(*words));
    for (int64_t i = 0; i < count; ++i) {
      const auto level =
          static_cast<uint32_t>(parts.Of(fixed_[i], format_.bits - 1) - format_.levels);
      const uint32_t minus = BitsOf(values_[positions_[i]]) >> 31;
      format_.Write(i, positions_[i], level | minus << (format_.bits - 1),
                    [&](int64_t word, uint32_t bits) { words[word] |= bits; });
    }
    return is_finite ? 0 : CountNonfinite();
  }

 private:
  static int32_t MaxOf(int32_t a, int32_t b) { return a < b ? b : a; }

  void Release() {
    operator delete[](values_, std::align_val_t{kCacheLine});
    delete[] magnitudes_;
    delete[] maxima_;
    delete[] positions_;
    delete[] fixed_;
  }

  // Reads a block, with zeros behind it up to a whole group.
  void Read(int64_t begin, int64_t end) {
    size_ = end - begin;
    const int64_t padded = CeilDiv(size_, kGroup) * kGroup;
    if (padded > room_) {
      Release();
      room_ = padded;
      values_ = new (std::align_val_t{kCacheLine}) float[room_];
      magnitudes_ = new int32_t[room_];
      maxima_ = new int32_t[room_];
      positions_ = new int32_t[room_];
      fixed_ = new int64_t[room_];
    }
    x_.Copy(begin, end, values_);
    memset(values_ + size_, 0, (padded - size_) * sizeof(float));
  }

  // Returns a number that the magnitudes of `count` elements, and not many more, reach.
  int32_t Bound(int64_t count) {
    // The largest of some elements each. If `count` of these reach a number, so many
    // elements do. There are four times as many, so that few other elements do.
    const int64_t groups = CeilDiv(size_, kGroup);
    const int64_t step = 1 + (size_ - 1) / (4 * count);
    int64_t number = 0;
    for (int64_t first = 0; first < groups; first += step) {
      I most[kParts];
      for (I& part : most) part = SetInts(0);
      const int64_t last = Smaller(first + step, groups);
      for (int64_t group = first; group < last; ++group) {
        for (int part = 0; part < kParts; ++part) {
          const F value = Load(values_ + group * kGroup + part * kWidth);
          most[part] = MaxInts(most[part], MagnitudeBits(value));
        }
      }
      for (int part = 0; part < kParts; ++part, number += kWidth) {
        StoreInts(maxima_ + number, most[part]);
      }
    }
    return number < count ? 0 : ReachedBy(maxima_, number, count);
  }

  // Finds the `count` largest elements: their positions, ascending, and magnitudes.
  void Select(int64_t count) {
    int64_t found = 0;
    const int32_t bound_bits = Bound(count);
    const F bound = Set(FloatOf(bound_bits));
    for (int64_t first = 0; first < size_; first += kGroup) {
      // Not below, so that a NaN is found.
      uint32_t below = 0;
      for (int part = 0; part < kParts; ++part) {
        const F value = Load(values_ + first + part * kWidth);
        below |= LessBits(Abs(value), bound) << (part * kWidth);
      }
      for (uint32_t left = ~below & LowBits(size_ - first); left != 0;
           left &= left - 1) {
        const int64_t j = first + __builtin_ctz(left);
        positions_[found] = static_cast<int32_t>(j);
        magnitudes_[found++] = BitsOf(values_[j]) & kMagnitude;
      }
    }
    const int32_t least = ReachedBy(magnitudes_, found, count);
    int64_t equal = count;  // The number of equal ones that are taken.
    for (int64_t i = 0; i < found; ++i) equal -= magnitudes_[i] > least;
    int64_t taken = 0;
    for (int64_t i = 0; i < found; ++i) {
      if (magnitudes_[i] < least || (magnitudes_[i] == least && equal-- <= 0)) continue;
      positions_[taken] = positions_[i];
      magnitudes_[taken++] = magnitudes_[i];
    }
  }

  void FixPoints(int64_t count, int top, bool is_finite) {
    const double scale = FixedScale(top);
    for (int64_t i = 0; i < count; ++i) {
      fixed_[i] = is_finite ? FixedPoint(magnitudes_[i], scale) : 0;
    }
  }

  MagnitudeParts Split(int64_t count) const {
    MagnitudeParts parts;
    for (int64_t splits = 0; splits < format_.bits; ++splits) {
      for (int64_t i = 0; i < count; ++i) {
        const int part = parts.Of(fixed_[i], splits);
        parts.total[part] += fixed_[i];
        ++parts.number[part];
      }
    }
    return parts;
  }

  int64_t CountNonfinite() const {
    int64_t nonfinite = 0;
    for (int64_t i = 0; i < size_; ++i) {
      nonfinite += (BitsOf(values_[i]) & kMagnitude) >= kInfinity;
    }
    return nonfinite;
  }

  const PackLargest args_;
  const ChunkFormat format_;
  CutReader<kGroup> x_;
  int64_t size_ = 0, room_ = 0;
  float* values_ = nullptr;
  // Of the elements that may be, and then are, sent; with the largest of parts.
  int32_t *magnitudes_ = nullptr, *positions_ = nullptr, *maxima_ = nullptr;
  int64_t* fixed_ = nullptr;
};

void Kernel(const Parallel& parallel, const PackLargest& args) {
  CountByBlock(parallel, args, &LargestPacker::Pack);
}

// The sums of N workers' chunks, one chunk after the other.
class LargestSums {
 public:
  explicit LargestSums(const MeanOfLargest& args)
      : args_(args),
        format_(args),
        sum_(new float[args.chunk]),
        own_(new float[args.chunk]()),
        positions_(new int32_t[args.k]) {}
  ~LargestSums() {
    delete[] sum_;
    delete[] own_;
    delete[] positions_;
  }
  LargestSums(const LargestSums&) = delete;
  LargestSums& operator=(const LargestSums&) = delete;

  // Writes the sums of the elements [begin, end).
  void Read(int64_t begin, int64_t end, float* to) {
    while (begin < end) {
      if (begin < begin_ || begin >= end_) Add(begin);
      const int64_t count = Smaller(end, end_) - begin;
      memcpy(to, sum_ + (begin - begin_), count * sizeof(float));
      begin += count;
      to += count;
    }
  }

 private:
  // Adds up the chunk of an element, most often the next one.
  void Add(int64_t element) {
    const bool is_next = element == end_;
    block_ =
        is_next ? block_ + 1 : BlockOf(element, args_.row_splits, args_.num_blocks);
    begin_ = args_.row_splits[block_];
    end_ = args_.row_splits[block_ + 1];
    memset(sum_, 0, (end_ - begin_) * sizeof(float));
    for (int64_t worker = 0; worker < args_.num_workers; ++worker) {
      const int64_t row = worker * args_.num_blocks + block_;
      AddRow(args_.words + row * format_.words, args_.levels + row * format_.levels);
    }
  }

  void AddRow(const uint32_t* words, const float* levels) {
    int64_t rank = 0, found = 0;
    for (int64_t at = 0; at < format_.unary; at += 32) {
      uint32_t left = words[at / 32] & LowBits(format_.unary - at);
      for (; left != 0 && rank < format_.k; left &= left - 1, ++rank) {
        const int64_t bit = at + __builtin_ctz(left);
        const int64_t position = format_.PositionOf(words, bit, rank);
        if (position >= end_ - begin_) continue;
        own_[position] += format_.ValueOf(words, levels, rank);
        positions_[found++] = static_cast<int32_t>(position);
      }
    }
    // Words that no sender writes may have a position twice.
    for (int64_t i = 0; i < found; ++i) {
      sum_[positions_[i]] += own_[positions_[i]];
      own_[positions_[i]] = 0;
    }
  }

  const MeanOfLargest args_;
  const ChunkFormat format_;
  int64_t block_ = -1, begin_ = -1, end_ = -1;
  float *sum_, *own_;  // Of all workers, and of one; the latter is 0 in between.
  int32_t* positions_;
};

void Kernel(const Parallel& parallel, const MeanOfLargest& args) {
  For(parallel, CeilDiv(args.size, kTile), 4 * kTile, [&](int64_t begin, int64_t end) {
    const DivideBy divide(args.num_workers);
    LargestSums sums(args);
    GroupWriter values(args.values, args.size);
    alignas(kCacheLine) float sum[kTile];
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kTile, last = Smaller(args.size, first + kTile);
      sums.Read(first, last, sum);
      for (int64_t at = first; at < last; at += kGroup) {
        F mean[kParts];
        LoadGroup(sum + (at - first), mean);
        for (F& part : mean) part = divide(part);
        values.Put(at, mean);
      }
    }
  });
}
