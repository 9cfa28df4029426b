// The random numbers of word_format.h, and comparisons that draw no more than they
// need.

// Elements that are compared together.
constexpr int64_t kDecided = 4 * kWidth;
// Groups of eight blocks that are drawn together.
constexpr int kDrawnGroups = 4;

inline uint64_t LowBits64(int64_t count) {
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

// The upper bits of the elements [begin, end), with room for kDrawn more; `begin` is a
// multiple of 16.
constexpr int64_t kDrawn = 128 * kDrawnGroups;
inline void DrawUpper(const RoundKeys& keys, RandomStream stream, int64_t begin,
                      int64_t end, uint8_t* upper) {
  for (int64_t at = begin; at < end; at += kDrawn, upper += kDrawn) {
    uint32_t words[kDrawn / 4];
    RandomWords<kDrawnGroups>(keys, stream.UpperBlock(at), words);
    memcpy(upper, words, sizeof(words));
  }
}

// The uniform numbers of kDecided elements, with all their lower bits; `begin` is a
// multiple of 8.
inline void DrawUniforms(const RoundKeys& keys, RandomStream stream, int64_t begin,
                         const uint8_t* upper, F (&uniforms)[4]) {
  uint32_t words[32];
  RandomWords<1>(keys, stream.LowerBlock(begin), words);
  uint16_t lower[64];
  memcpy(lower, words, sizeof(words));
  for (int i = 0; i < 4; ++i) {
    uniforms[i] = Uniforms(upper + i * kWidth, lower + i * kWidth);
  }
}

// A comparison, uniform * scale < value, that the upper bits do not decide, of the
// element at `place` in a tile.
struct Undecided {
  int32_t place;
  float scale, value;
  float x;
};

// The undecided comparisons of a tile of at most `Most` elements. They wait until there
// are enough to draw their lower bits together.
template <int64_t Most>
class UndecidedOfTile {
 public:
  explicit UndecidedOfTile(RandomStream stream) : stream_(stream) {}

  // Adds undecided_of(i) for each bit i.
  template <typename UndecidedOf>
  inline __attribute__((always_inline)) void Add(uint64_t bits,
                                                 const UndecidedOf& undecided_of) {
    // There is seldom more than one; no branch tests whether there is any.
    all_[count_] = undecided_of(__builtin_ctzll(bits | uint64_t{1} << (kDecided - 1)));
    count_ += bits != 0;
    for (bits &= bits - 1; __builtin_expect(bits != 0, 0); bits &= bits - 1) {
      all_[count_++] = undecided_of(__builtin_ctzll(bits));
    }
  }

  // Calls complete(undecided) for each comparison that was added since the last call.
  template <typename Complete>
  void CompleteLast(const Complete& complete) {
    for (; completed_ < count_; ++completed_) complete(all_[completed_]);
  }

  // Calls use(undecided) for each comparison that holds, and clears the list. The tile
  // begins at element `begin`, a multiple of 8; `upper` are its upper bits.
  template <typename Use>
  void Decide(const RoundKeys& keys, int64_t begin, const uint8_t* upper,
              const Use& use) {
    for (int64_t first = 0; first < count_; first += 8) {
      uint64_t blocks[8];
      for (int i = 0; i < 8; ++i) {
        blocks[i] = stream_.LowerBlock(begin + all_[first + i].place);
      }
      uint32_t words[32];
      RandomWordsOf(keys, blocks, words);
      for (int i = 0; i < 8 && first + i < count_; ++i) {
        const Undecided& one = all_[first + i];
        const uint32_t word = words[4 * i + one.place % 8 / 2];
        const uint32_t lower = word >> (16 * (one.place % 2)) & 0xFFFF;
        if (Uniform(upper[one.place], lower) * one.scale < one.value) use(one);
      }
    }
    count_ = completed_ = 0;
  }

 private:
  RandomStream stream_;
  int64_t count_ = 0, completed_ = 0;
  Undecided all_[Most + 8] = {};
};

// Returns whether upper bits can be compared with the thresholds 2^16 * value / scale:
// if no product is near a denormal, 0 or infinity.
inline bool IsOrdinary(float scale) { return scale >= 0x1p-100f && scale <= 0x1p100f; }

// An element between evenly spaced levels is given by its position, in [0, 2^24], in
// units of 2^-16 of their distance; it may be wrong by five units. Element p becomes
// level n if n - 1 < p - u <= n, with its uniform number u. *undecided gets a bit for
// each lane that the upper bits do not decide.
inline I RoundPositions(F positions, const uint8_t* upper, uint32_t* undecided) {
  // p - u is in (rest - 261, rest + 6).
  const I rest = SubInts(Truncate(positions), WidenBytes<8>(upper));
  const I near = And(AddInts(rest, SetInts(6)), SetInts(0xFFFF));
  *undecided = LessBits(near, SetInts(268));
  return ShiftRight(AddInts(rest, SetInts(0xFFFF)), 16);
}

// Coins, of 1024 elements at a time.
class CoinReader {
 public:
  explicit CoinReader(const uint64_t* stream)
      : stream_(stream == nullptr ? RandomStream{} : ToStream(stream)),
        keys_(stream_) {}

  // Returns the coins of a group.
  uint32_t At(int64_t begin) {
    const int64_t place = begin / kGroup - first_;
    if (place >= 0 && place < 32) return words_[place];
    first_ = begin / 128 * 128 / kGroup;
    RandomWords<1>(keys_, stream_.CoinBlock(begin), words_);
    return words_[begin / kGroup - first_];
  }

 private:
  RandomStream stream_;
  RoundKeys keys_;
  int64_t first_ = -32;
  uint32_t words_[32];
};
