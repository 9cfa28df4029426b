// Selection: the number of a given rank, without sorting.
//
// A vector of keys at a time is divided into those below a pivot and the others. Pivots
// come from samples, and lie a little beyond the wanted rank, on the side of the
// middle: most often the fewer keys go on. So a selection takes about two reads of
// the keys, and without branches that depend on them.

// A number as an integer that has the order of numbers, and back.
inline int32_t KeyOfNumber(float number) {
  const uint32_t magnitude = BitsOf(number) & 0x7FFFFFFF;
  const int32_t key = static_cast<int32_t>(magnitude);
  return magnitude == BitsOf(number) ? key : -key;
}
inline float NumberOfKey(int32_t key) {
  // The sign is set without arithmetic, which may flush a denormal to zero.
  const uint32_t bits = static_cast<uint32_t>(key);
  return FloatOf(key < 0 ? (0 - bits) | uint32_t{1} << 31 : bits);
}

// Returns combine(a, b) over the lanes of a vector.
template <typename Combine>
inline int32_t OverLanes(I a, const Combine& combine) {
  int32_t lanes[kWidth];
  StoreInts(lanes, a);
  for (int i = 1; i < kWidth; ++i) lanes[0] = combine(lanes[0], lanes[i]);
  return lanes[0];
}
inline int32_t LargerKey(int32_t a, int32_t b) { return a > b ? a : b; }
inline int32_t SmallerKey(int32_t a, int32_t b) { return a < b ? a : b; }

// So many keys are compared each with each.
constexpr int kSample = 32;

// 0, 1, ...
struct Places {
  int32_t places[kSample];

  constexpr Places() : places() {
    for (int i = 0; i < kSample; ++i) places[i] = i;
  }
};
constexpr Places kPlaces;

// Up to kSample keys, with the number of keys below each. Reads kSample keys.
class Ranks {
 public:
  Ranks(const int32_t* keys, int64_t count) {
    const I last = SetInts(static_cast<int32_t>(count) - 1);
    alignas(kCacheLine) int32_t padded[kSample];
    for (int v = 0; v < kVectors; ++v) {
      below_[v] = SetInts(0);
      // Keys above all others take the places of those beyond the last.
      keys_[v] = MaxWhereLess(LoadInts(keys + v * kWidth), SetInts(INT32_MAX), last,
                              LoadInts(kPlaces.places + v * kWidth));
      StoreInts(padded + v * kWidth, keys_[v]);
    }
    for (int i = 0; i < kSample; ++i) {
      const I key = SetInts(padded[i]);
      for (int v = 0; v < kVectors; ++v) {
        below_[v] = AddLess(below_[v], key, keys_[v]);
      }
    }
  }

  // The key of rank `rank`: the largest of those with at most `rank` keys below them.
  int32_t KeyOf(int64_t rank) const {
    const I above = SetInts(static_cast<int32_t>(rank) + 1);
    I most = SetInts(INT32_MIN);
    for (int v = 0; v < kVectors; ++v) {
      most = MaxWhereLess(most, keys_[v], below_[v], above);
    }
    return OverLanes(most, LargerKey);
  }

 private:
  static constexpr int kVectors = kSample / kWidth;
  I below_[kVectors], keys_[kVectors];
};

// Sets bounds between which the key of a rank is likely to be, by a sample.
inline void Sample(const int32_t* keys, int64_t size, int64_t rank, int32_t* low,
                   int32_t* high) {
  constexpr int kBeyond = 5;  // Nearly two standard deviations.
  const int64_t step = size / kSample;
  int32_t sample[kSample];
  for (int i = 0; i < kSample; ++i) sample[i] = keys[i * step];
  const Ranks ranks(sample, kSample);
  const int64_t near = rank * kSample / size;
  if (near >= kBeyond) *low = ranks.KeyOf(near - kBeyond);
  if (near < kSample - kBeyond) *high = ranks.KeyOf(near + kBeyond);
}

// The same, if the numbers are spread evenly between the present bounds.
inline void Interpolate(int64_t size, int64_t rank, int32_t* low, int32_t* high) {
  const float first = NumberOfKey(*low), last = NumberOfKey(*high);
  const float share = 1 / static_cast<float>(size);
  const float near = (static_cast<float>(rank) + 0.5f) * share;
  const float beyond = __builtin_sqrtf(share) + 0.03f;
  const float from = near - beyond, to = near + beyond;
  if (from > 0) *low = KeyOfNumber(first * (1 - from) + last * from);
  if (to < 1) *high = KeyOfNumber(first * (1 - to) + last * to);
}

// Copies the keys that bits_of(vector) keeps, in the order in which they are, to a place
// that may be their own. Returns their number. Reads and writes up to kWidth keys past
// the last; bits_of(vector, valid) gets the bits of those that count.
template <typename Bits>
inline int64_t Filter(const int32_t* keys, int64_t count, int32_t* to,
                      const Bits& bits_of) {
  int64_t kept = 0, at = 0;
  const auto filter = [&](uint32_t valid) {
    const I some = LoadInts(keys + at);
    const uint32_t bits = bits_of(some, valid);
    StoreWhere(to + kept, bits, some);
    kept += __builtin_popcount(bits);
  };
  for (; at + kWidth <= count; at += kWidth) filter(LowBits(kWidth));
  if (at < count) filter(LowBits(count - at));
  return kept;
}

// Puts the keys below one of them first and those above it last. Keys past the end stay
// as they are, though kWidth of them are read and written.
inline void Divide(int32_t* keys, int64_t count, int32_t key, int32_t* spare) {
  const I edge = SetInts(key), after = LoadInts(keys + count);
  const int64_t above = Filter(keys, count, spare, [&](I some, uint32_t valid) {
    return LessBits(edge, some) & valid;
  });
  int64_t below = Filter(keys, count, keys, [&](I some, uint32_t valid) {
    return LessBits(some, edge) & valid;
  });
  for (; below < count - above; ++below) keys[below] = key;
  for (int64_t at = 0; at < above; at += kWidth) {
    StoreInts(keys + below + at, LoadInts(spare + at));
  }
  StoreInts(keys + count, after);
}

// Copies the keys from `low` to `high`. Returns their number, and that of the keys below
// `low`.
inline int64_t FilterBetween(const int32_t* keys, int64_t count, int32_t low,
                             int32_t high, int32_t* to, int64_t* below) {
  const I first = SetInts(low), last = SetInts(high);
  int64_t number = 0;
  const int64_t kept = Filter(keys, count, to, [&](I some, uint32_t valid) {
    const uint32_t under = LessBits(some, first) & valid;
    number += __builtin_popcount(under);
    return AtMostBits(some, last) & valid & ~under;
  });
  *below = number;
  return kept;
}

inline int32_t Between(int32_t low, int32_t high) {
  const uint32_t least = static_cast<uint32_t>(low);
  return static_cast<int32_t>(least + (static_cast<uint32_t>(high) - least) / 2);
}

// Returns the key of rank `rank`, counted from 0.
inline int32_t Select(const int32_t* keys, int64_t count, int64_t rank,
                      int32_t* spare) {
  // After so many rounds, which samples or interpolation may have failed to shorten,
  // the range of keys is halved.
  constexpr int kGuesses = 12;
  const int32_t* from = keys;
  int64_t size = count, place = rank;
  int32_t least = INT32_MIN, most = INT32_MAX;
  bool is_even = false;  // Whether keys are likely to be spread evenly.
  for (int round = 0; size > kSample; ++round) {
    int32_t low = least, high = most;
    if (round >= kGuesses) {
      high = Between(least, most);
    } else if (is_even) {
      Interpolate(size, place, &low, &high);
    } else {
      Sample(from, size, place, &low, &high);
    }
    int64_t below;
    const int64_t kept = FilterBetween(from, size, low, high, spare, &below);
    is_even = below <= place && place < below + kept;
    if (is_even) {
      if (low == high) return low;
      least = low;
      most = high;
      size = kept;
      place -= below;
    } else {
      if (place < below) most = low - 1;
      if (place >= below + kept) least = high + 1;
      size = FilterBetween(keys, count, least, most, spare, &below);
      place = rank - below;
    }
    from = spare;
  }
  return Ranks(from, size).KeyOf(place);
}
