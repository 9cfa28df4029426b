// Selection: the key of a given rank, without sorting.
//
// Bounds close in on the key. Where keys are not spread evenly, a sample of them gives
// the first two: around the rank that the key has, they lie as many places of the
// sample apart as chance asks for. The keys between them are copied, and counted with
// those below. They are likely to be spread evenly, so the next bounds are
// interpolated; and a few keys are compared each with each. So a selection takes little
// more than one read of the keys, and no branch depends on a single key. Bounds that
// have missed the key only cost time: all are read again, from the side on which the
// key is.

// A number as an integer that has the order of numbers, and back.
inline int32_t KeyOfNumber(float number) {
  const uint32_t magnitude = BitsOf(number) & kMagnitude;
  const int32_t key = static_cast<int32_t>(magnitude);
  return magnitude == BitsOf(number) ? key : -key;
}
inline float NumberOfKey(int32_t key) {
  // The sign is set without arithmetic, which may flush a denormal to zero.
  const uint32_t bits = static_cast<uint32_t>(key);
  return FloatOf(key < 0 ? (0 - bits) | uint32_t{1} << 31 : bits);
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
    return LargestLane(most);
  }

 private:
  static constexpr int kVectors = kSample / kWidth;
  I below_[kVectors], keys_[kVectors];
};

// Sets bounds between which the key of a rank is likely to be, where a sample does. The
// bounds that come stay if the sample has none.
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

// The same for numbers that are spread evenly between the bounds that come. The rank is
// likely to be wrong by less than the square root of the size and a part of it.
inline void Interpolate(int64_t size, int64_t rank, int32_t* low, int32_t* high) {
  const float first = NumberOfKey(*low), last = NumberOfKey(*high);
  const float share = 1 / static_cast<float>(size);
  const float near = (static_cast<float>(rank) + 0.5f) * share;
  const float beyond = __builtin_sqrtf(share) + 0.03f;
  const float from = near - beyond, to = near + beyond;
  // Processors may take denormals for zeros, and so leave the bounds.
  const int32_t least = *low, most = *high;
  const auto key_at = [&](float part) {
    const int32_t key = KeyOfNumber(first * (1 - part) + last * part);
    return LargerKey(least, SmallerKey(key, most));
  };
  if (from > 0) *low = key_at(from);
  if (to < 1) *high = LargerKey(*low, key_at(to));
}

// Copies the keys from `low` to `high`, in the order in which they are, to a place that
// may be their own. Returns their number; *below is the number of those below `low`.
// Reads and writes up to kWidth keys past the last.
inline int64_t Filter(const int32_t* keys, int64_t count, int32_t low, int32_t high,
                      int32_t* to, int64_t* below) {
  int64_t kept = 0, under = 0, at = 0;
  if constexpr (!kCompresses) {
    const uint32_t least = static_cast<uint32_t>(low);
    const uint32_t range = static_cast<uint32_t>(high) - least;
    for (; at < count; ++at) {
      const int32_t key = keys[at];
      to[kept] = key;
      kept += static_cast<uint32_t>(key) - least <= range;
      under += key < low;
    }
  } else {
    const I first = SetInts(low), last = SetInts(high);
    const auto filter = [&](uint32_t valid) {
      const I some = LoadInts(keys + at);
      const uint32_t lower = LessBits(some, first) & valid;
      const uint32_t bits = AtMostBits(some, last) & valid & ~lower;
      StoreWhere(to + kept, bits, some);
      kept += CountBits(bits);
      under += CountBits(lower);
    };
    for (; at + kWidth <= count; at += kWidth) filter(LowBits(kWidth));
    if (at < count) filter(LowBits(count - at));
  }
  *below = under;
  return kept;
}

// The middle of two keys.
inline int32_t Between(int32_t low, int32_t high) {
  const uint32_t least = static_cast<uint32_t>(low);
  return static_cast<int32_t>(least + (static_cast<uint32_t>(high) - least) / 2);
}

// Returns the key of rank `rank`, counted from 0, of keys from `least` to `most`.
// `is_even` says whether their numbers are likely to be spread evenly.
inline int32_t Select(const int32_t* keys, int64_t count, int64_t rank, int32_t least,
                      int32_t most, bool is_even, int32_t* spare) {
  // After so many rounds, and where a guess has kept all keys, the bounds are halved,
  // so that there is an end: a sample of keys with few values may be of no use.
  constexpr int kGuesses = 12;
  const int32_t* from = keys;
  int64_t size = count, place = rank;
  bool is_stuck = false;
  for (int round = 0; size > kSample; ++round) {
    int32_t low = least, high = most;
    if (round >= kGuesses || is_stuck) {
      high = Between(least, most);
    } else if (is_even) {
      Interpolate(size, place, &low, &high);
    } else {
      Sample(from, size, place, &low, &high);
    }
    int64_t below;
    const int64_t kept = Filter(from, size, low, high, spare, &below);
    if (below <= place && place < below + kept) {
      if (low == high) return low;
      is_stuck = kept == size && !is_stuck;
      // In the tails they are not.
      is_even = least < low && high < most;
      least = low;
      most = high;
      size = kept;
      place -= below;
    } else {
      is_even = is_stuck = false;
      if (place < below) most = low - 1;
      if (place >= below + kept) least = high + 1;
      size = Filter(keys, count, least, most, spare, &below);
      place = rank - below;
    }
    from = spare;
  }
  return Ranks(from, size).KeyOf(place);
}
