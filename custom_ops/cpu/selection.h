// Selection: the number of a given rank, without sorting.
//
// A vector of keys at a time is divided into those below a pivot and the others. Pivots
// come from samples, and lie a little beyond the wanted rank, on the side of the
// middle: most often the fewer keys go on. So a selection takes about two reads of
// the keys, and without branches that depend on them.

// Fewer keys than these are not divided any more.
constexpr int kSample = 32;

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

// Returns the key of rank `rank`, counted from 0, of up to kSample keys.
inline int32_t KeyOfRank(const int32_t* keys, int64_t count, int64_t rank) {
  constexpr int kVectors = kSample / kWidth;
  alignas(kCacheLine) int32_t padded[kSample];
  for (int i = 0; i < kSample; ++i) padded[i] = INT32_MAX;
  memcpy(padded, keys, count * sizeof(int32_t));
  I below[kVectors], own[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    below[v] = SetInts(0);
    own[v] = LoadInts(padded + v * kWidth);
  }
  for (int64_t i = 0; i < count; ++i) {
    const I key = SetInts(keys[i]);
    for (int v = 0; v < kVectors; ++v) below[v] = AddLess(below[v], key, own[v]);
  }
  // It is the largest of those with at most `rank` keys below them.
  const I above = SetInts(static_cast<int32_t>(rank) + 1);
  I most = SetInts(INT32_MIN);
  for (int v = 0; v < kVectors; ++v) most = MaxWhereLess(most, own[v], below[v], above);
  return OverLanes(most, LargerKey);
}

// Puts the keys below `pivot` first, and each kind in the order in which they were.
// Returns where the others begin. Reads and writes kWidth keys past the end, which stay
// as they are; `others` has room for as many more.
inline int64_t Divide(int32_t* keys, int64_t begin, int64_t end, int32_t pivot,
                      int32_t* others) {
  const I edge = SetInts(pivot), after = LoadInts(keys + end);
  int32_t *low = keys + begin, *high = others;
  for (int64_t at = begin; at < end; at += kWidth) {
    const I some = LoadInts(keys + at);
    const uint32_t all = LowBits(Smaller(end - at, kWidth));
    const uint32_t below = LessBits(some, edge) & all;
    StoreWhere(low, below, some);
    StoreWhere(high, below ^ all, some);
    const int count = __builtin_popcount(below);
    low += count;
    high += Smaller(end - at, kWidth) - count;
  }
  for (int64_t at = 0; at < high - others; at += kWidth) {
    StoreInts(low + at, LoadInts(others + at));
  }
  StoreInts(keys + end, after);
  return low - keys;
}

// Puts that key into place `place` of [begin, end) which sorting would put there: none
// before it is larger, and none after it is smaller. Returns the key.
inline int32_t Select(int32_t* keys, int64_t begin, int64_t end, int64_t place,
                      int32_t* spare) {
  // Samples narrow the range; if they fail, halving the range of keys does not.
  constexpr int kSamplings = 24, kBeyond = 4;
  int32_t least = INT32_MIN, most = INT32_MAX;
  for (int round = 0;; ++round) {
    const int64_t size = end - begin;
    int32_t pivot;
    if (size <= kSample) {
      pivot = KeyOfRank(keys + begin, size, place - begin);
    } else if (round < kSamplings) {
      int32_t sample[kSample];
      for (int i = 0; i < kSample; ++i) sample[i] = keys[begin + i * size / kSample];
      const int64_t near = (place - begin) * kSample / size;
      pivot = KeyOfRank(sample, kSample,
                        near < kSample / 2 ? near + kBeyond : near - kBeyond);
    } else {
      const uint32_t range = static_cast<uint32_t>(most) - static_cast<uint32_t>(least);
      pivot = static_cast<int32_t>(static_cast<uint32_t>(least) + range / 2 + 1);
    }
    int64_t middle = Divide(keys, begin, end, pivot, spare);
    if (place < middle) {
      end = middle;
      most = pivot - 1;
      continue;
    }
    if (middle == begin || size <= kSample) {
      // The pivot is the smallest key.
      middle = Divide(keys, middle, end, pivot + 1, spare);
      if (place < middle) return pivot;
      pivot += 1;
    }
    begin = middle;
    least = pivot;
  }
}
