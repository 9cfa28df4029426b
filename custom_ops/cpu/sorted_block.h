// A block as if it were sorted: the element at a place, and the sum of those before it.
//
// Nothing is sorted. The keys are counted and added up in bins, by their sign, their
// exponent and the first bits of their mantissa. An element is looked for among the
// keys of one bin only, mostly a few dozen. Sums are of integers, so their order does
// not matter.

class SortedBlock {
 public:
  // The element at `place`. `first` is the number of smaller elements, q the element's
  // integer and `before` the sum of the integers of the elements before it.
  struct Element {
    int64_t place, first;
    int32_t key;
    int64_t q, before;
  };

  SortedBlock(const CutVector<const float>& x, int64_t size) : x_(x, size) {}
  ~SortedBlock() { Release(); }
  SortedBlock(const SortedBlock&) = delete;
  SortedBlock& operator=(const SortedBlock&) = delete;

  int64_t size() const { return size_; }
  int32_t smallest() const { return smallest_; }
  int32_t largest() const { return largest_; }
  bool IsFinite() const { return top_ != kInfinite; }

  // Reads the keys of the elements [begin, end), or of their magnitudes.
  void Read(int64_t begin, int64_t end, bool of_magnitudes) {
    Reserve(end - begin);
    begin_ = begin;
    x_.Copy(begin, end, reinterpret_cast<float*>(keys_));
    // The last vector is filled up.
    for (int64_t i = 0; i < kWidth; ++i) memcpy(keys_ + size_ + i, keys_, 4);
    const I kept = SetInts(of_magnitudes ? INT32_MAX : -1);
    I smallest = SetInts(INT32_MAX), largest = SetInts(INT32_MIN);
    for (int64_t at = 0; at < size_; at += kWidth) {
      const I keys = KeysOf(And(LoadInts(keys_ + at), kept));
      smallest = MinInts(smallest, keys);
      largest = MaxInts(largest, keys);
      StoreInts(keys_ + at, keys);
    }
    smallest_ = ~LargestLane(Xor(smallest, SetInts(-1)));
    largest_ = LargestLane(largest);
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

  // The integer of an element. The largest magnitude has 30 bits.
  int64_t Q(int32_t key) const {
    int32_t lanes[kWidth];
    StoreInts(lanes, FixedPoints(SetInts(key)));
    return lanes[0];
  }

  // The sum of the integers of the elements below a key; *number is their number.
  int64_t SumBelow(int32_t key, int64_t* number) const {
    return SumBelow(keys_, size_, key, number);
  }

  float Mean(int64_t total, int64_t count) const {
    return MeanOfFixed(total, count, top_);
  }

  // -- By place, after Count() ------------------------------------------------------

  // Counts the elements in bins, to find so many of them.
  void Count(int64_t num_places) {
    ChooseBins();
    first_bin_ = BinOf(smallest_);
    num_bins_ = BinOf(largest_) - first_bin_ + 1;
    for (int bin = 0; bin <= num_bins_; ++bin) starts_[bin] = sums_[bin] = 0;
    // The counts and sums of so many elements go into one integer.
    constexpr int64_t kTogether = 1 << 14;
    for (int64_t begin = 0; begin < size_; begin += kTogether) {
      int64_t counted[kMostBins] = {};
      CountIn(counted + kMostBins / 2, begin, Smaller(size_, begin + kTogether));
      const int64_t* counts = counted + kMostBins / 2 + first_bin_;
      for (int bin = 0; bin < num_bins_; ++bin) {
        const int64_t count = (counts[bin] + kOne / 2) >> kSumBits;
        starts_[bin] += count;
        sums_[bin] += counts[bin] - count * kOne;
      }
    }
    int64_t start = 0, sum = 0;
    for (int bin = 0; bin <= num_bins_; ++bin) {
      const int64_t count = starts_[bin], in_bin = sums_[bin];
      starts_[bin] = start;
      sums_[bin] = sum;
      start += count;
      sum += in_bin;
    }
    found_ = -1;
    is_grouped_ = num_places > kFewPlaces;
    if (is_grouped_) Group();
  }

  int64_t total() const { return sums_[num_bins_]; }

  Element At(int64_t place) {
    const int64_t bin = BlockOf(place, starts_, num_bins_);
    const int64_t start = starts_[bin], count = starts_[bin + 1] - start;
    if (bin != found_) Find(bin);
    const int64_t byte = first_bin_ + bin;
    const int64_t first_key =
        (byte + (byte > 0 ? core_ : -core_)) * (int64_t{1} << shift_);
    const int64_t last_key =
        (byte + (byte < 0 ? -core_ : core_) + 1) * (int64_t{1} << shift_);
    const int32_t key =
        Select(in_bin_, count, place - start,
               first_key > smallest_ ? static_cast<int32_t>(first_key) : smallest_,
               last_key <= largest_ ? static_cast<int32_t>(last_key - 1) : largest_,
               byte != 0, spare_);
    int64_t number;
    const int64_t below = sums_[bin] + SumBelow(in_bin_, count, key, &number);
    const int64_t first = start + number, q = Q(key);
    return {place, first, key, q, below + (place - first) * q};
  }

 private:
  static constexpr int kInfinite = 255;
  static constexpr int kMostBins = 256;
  // More places are worth the time that Group() takes.
  static constexpr int64_t kFewPlaces = 24;
  // In smaller blocks, fewer bins are counted.
  static constexpr int64_t kSmall = 256;
  static constexpr int64_t kPiece = 256;
  static constexpr int kSumBits = 48;
  static constexpr int64_t kOne = int64_t{1} << kSumBits;

  // Vectors and Select() read so far past the last key.
  static constexpr int64_t kBeyond = 64;

  void Release() {
    delete[] keys_;
    delete[] found_keys_;
    delete[] spare_;
    delete[] bins_;
  }

  // Makes room for `size` elements.
  void Reserve(int64_t size) {
    if (size > room_) {
      Release();
      room_ = size;
      keys_ = new int32_t[room_ + kBeyond];
      found_keys_ = new int32_t[room_ + kBeyond];
      spare_ = new int32_t[room_ + kBeyond];
      bins_ = new int8_t[room_ + kBeyond];
    }
    size_ = size;
  }

  static int ExponentOf(int32_t key) { return (key < 0 ? -key : key) >> 23; }

  I FixedPoints(I keys) const {
    return RoundNormal(NumbersOf(keys), Set(scale_), Set(other_scale_));
  }

  int64_t SumBelow(const int32_t* keys, int64_t count, int32_t key,
                   int64_t* number) const {
    // So many integers of 31 bits are added in float64 without rounding.
    constexpr int64_t kExact = int64_t{1} << 16;
    const I end = SetInts(key);
    int64_t total = 0, below = 0;
    for (int64_t first = 0; first < count; first += kExact) {
      D sum = SetDoubles(0);
      const int64_t last = Smaller(count, first + kExact);
      for (int64_t at = first; at < last; at += kWidth) {
        const I some = LoadInts(keys + at);
        const uint32_t bits = LessBits(some, end) & LowBits(last - at);
        below += CountBits(bits);
        sum = AddWide(sum, KeepWhere(bits, FixedPoints(some)));
      }
      total += static_cast<int64_t>(SumLanes(sum));
    }
    *number = below;
    return total;
  }

  // A bin is a part of an octave: of a sixteenth if eight octaves hold most elements.
  // The numbers below them are all of one bin. A sample tells how many there are.
  void ChooseBins() {
    int octaves = 8;
    shift_ = size_ <= kSmall ? 21 : 19;
    int least = top_ - octaves + 1;
    const auto are_many_below = [&] {
      int below = 0;
      for (int64_t i = 0; i < kSample; ++i) {
        const int exponent = ExponentOf(keys_[i * size_ / kSample]);
        below += (exponent > 0) & (exponent < least);
      }
      return below > kSample / 8;
    };
    while (octaves < 64 && shift_ < 23 && are_many_below()) {
      octaves *= 2;
      ++shift_;
      least = top_ - octaves + 1;
    }
    // A few keys are all of one bin.
    if (size_ <= kSample) least = kInfinite;
    core_ = LargerKey(least, 0) << (23 - shift_);
  }

  int BinOf(int32_t key) const {
    const int32_t bin = key >> shift_;
    return bin - LargerKey(-core_, SmallerKey(bin, core_));
  }

  // Adds the elements [begin, end) to their bins.
  void CountIn(int64_t* bins, int64_t begin, int64_t end) {
    const I core = SetInts(core_), minus_core = SetInts(-core_);
    int32_t q[kPiece];
    for (int64_t first = begin; first < end; first += kPiece) {
      const int64_t count = Smaller(kPiece, end - first);
      const int32_t* const keys = keys_ + first;
      int8_t* const places = bins_ + first;
      x_.Prefetch(begin_ + size_ + first, count);  // The next block.
      for (int64_t i = 0; i < count; i += kWidth) {
        const I some = LoadInts(keys + i), bin = ShiftRight(some, shift_);
        const I inner = MaxInts(minus_core, MinInts(bin, core));
        StoreBytes(places + i, SubInts(bin, inner));
        StoreInts(q + i, FixedPoints(some));
      }
      for (int64_t i = 0; i < count; ++i) bins[places[i]] += kOne + q[i];
    }
  }

  // Puts the keys in the order of their bins.
  void Group() {
    int64_t ends[kMostBins];
    memcpy(ends, starts_, num_bins_ * sizeof(int64_t));
    for (int64_t i = 0; i < size_; ++i) {
      found_keys_[ends[bins_[i] - first_bin_]++] = keys_[i];
    }
  }

  // Finds the keys of a bin.
  void Find(int64_t bin) {
    found_ = bin;
    if (is_grouped_) {
      in_bin_ = found_keys_ + starts_[bin];
      return;
    }
    in_bin_ = keys_;
    if (starts_[bin + 1] - starts_[bin] == size_) return;
    in_bin_ = found_keys_;
    const int8_t byte = static_cast<int8_t>(bin + first_bin_);
    int64_t count = 0;
    for (int64_t at = 0; at < size_; at += kDecided) {
      uint64_t bits = EqualBytes(bins_ + at, byte) & LowBits64(size_ - at);
      const auto take = [&] {
        // There are seldom more than two; no branch tests whether there are any.
        found_keys_[count] =
            keys_[at + __builtin_ctzll(bits | uint64_t{1} << (kDecided - 1))];
        count += bits != 0;
        bits &= bits - 1;
      };
      take();
      take();
      while (__builtin_expect(bits != 0, 0)) take();
    }
  }

  CutReader<kGroup> x_;
  int32_t *keys_ = nullptr, *found_keys_ = nullptr, *spare_ = nullptr;
  const int32_t* in_bin_ = nullptr;  // The keys of bin `found_`.
  int8_t* bins_ = nullptr;
  bool is_grouped_ = false;
  int64_t room_ = 0, size_ = 0, begin_ = 0, found_ = -1;
  int32_t smallest_ = 0, largest_ = 0, core_ = 0;
  int shift_ = 0;
  int first_bin_ = 0, num_bins_ = 0;
  int top_ = 0;  // The exponent of the largest magnitude.
  float scale_ = 0, other_scale_ = 0;
  // Of each bin, the numbers and the sums of the elements before it.
  int64_t starts_[kMostBins + 1], sums_[kMostBins + 1];
};
