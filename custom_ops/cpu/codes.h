// Codes of any base: digits in words, and sums of them.

// Base 3 uses masks: V(mask) is the sum of 3^j over the bits j of a 20-bit mask, and
// the word of codes that are 1, plus 1 at `plus` and less 1 at `minus`, is V(all) +
// V(plus) - V(minus).
struct TernaryTables {
  uint32_t low[1 << 10], high[1 << 10];  // V of the lower and the upper ten bits.

  constexpr TernaryTables() : low(), high() {
    for (uint32_t mask = 0; mask < 1 << 10; ++mask) {
      uint32_t power = 1;
      for (int j = 0; j < 10; ++j, power *= 3) {
        if (mask >> j & 1) low[mask] += power;
      }
      high[mask] = low[mask] * power;
    }
  }
  uint32_t V(uint32_t mask) const { return low[mask & 1023] + high[mask >> 10]; }
};
constexpr TernaryTables kTernary;

// 20 bits of a stream of bits.
inline uint32_t TernaryBits(const uint32_t* bits, int64_t word) {
  const int64_t first = word * kTernaryDigits;
  uint32_t window;
  memcpy(&window, reinterpret_cast<const char*>(bits) + first / 8, sizeof(window));
  return window >> (first % 8) & LowBits(kTernaryDigits);
}

// A tile that is whole words of 32 signs and whole words of 20 digits.
constexpr int64_t kTernaryTile = 2560;

// Packs vote + 1 of `count` elements, whose votes are given as bits for +1 and -1. The
// arrays have room for four bytes past the tile.
inline void PackTernaryTile(const uint32_t* plus, const uint32_t* minus, int64_t count,
                            uint32_t* words) {
  const int64_t full = count / kTernaryDigits, rest = count % kTernaryDigits;
  const uint32_t all = kTernary.V(LowBits(kTernaryDigits));
  for (int64_t w = 0; w < full; ++w) {
    words[w] =
        all + kTernary.V(TernaryBits(plus, w)) - kTernary.V(TernaryBits(minus, w));
  }
  if (rest) {
    const uint32_t valid = LowBits(rest);
    words[full] = kTernary.V(valid) + kTernary.V(TernaryBits(plus, full) & valid) -
                  kTernary.V(TernaryBits(minus, full) & valid);
  }
}

// Codes go through buffers of about this many integers.
constexpr int64_t kTile = 2048;
// Room for a vector that begins at the last code.
constexpr int64_t kSlack = 32;

// Packs and unpacks digits of one base.
class Digits {
 public:
  explicit Digits(uint64_t base) : base_(base), count_(DigitsPerWord(base)) {
    uint64_t power = 1;
    for (int j = 0; j < kMost; ++j, power *= base) {
      powers_[j] = j < count_ ? static_cast<int32_t>(static_cast<uint32_t>(power)) : 0;
    }
    FillPatterns();
  }
  int count() const { return count_; }

  // Packs `size` codes. Codes can be read up to `readable`, which is >= size.
  void Pack(const int32_t* codes, int64_t size, int64_t readable,
            uint32_t* words) const {
    const int64_t padded = CeilDiv(count_, kWidth) * kWidth;
    const int64_t whole = Smaller(size, readable - (padded - count_)) / count_;
    int64_t w = 0;
    if (base_ != 2 && whole > 0) {
      w = whole / 4 * 4;
      count_ <= kWidth ? PackFours<true>(codes, w, words)
                       : PackFours<false>(codes, w, words);
      codes += w * count_;
    }
    for (; w < whole; ++w, codes += count_) words[w] = PackOne(codes);
    for (int64_t first = w * count_; first < size; first += count_, codes += count_) {
      int32_t buffer[kMost] = {};
      memcpy(buffer, codes, Smaller(count_, size - first) * sizeof(int32_t));
      words[w++] = PackOne(buffer);
    }
  }

  // Sums of the digits of N words, for each of `size` words; `stride` words lie between
  // two workers'. Writes up to kSlack integers past the codes.
  void Sum(const uint32_t* words, int64_t num_workers, int64_t stride, int64_t size,
           int32_t* codes) const {
    if (base_ == 2) {
      for (int64_t w = 0; w < size; ++w, codes += kGroup) {
        EachPart([&](auto part) {
          I sum = SetInts(0);
          for (int64_t i = 0; i < num_workers; ++i) {
            sum = AddBits<part.kPart>(sum, words[i * stride + w]);
          }
          StoreInts(codes + part.kPart * kWidth, sum);
        });
      }
    } else if (count_ == 1) {
      // Only a faulty sender's word is above the largest code.
      for (int64_t w = 0; w < size; ++w) {
        uint32_t sum = 0;
        for (int64_t i = 0; i < num_workers; ++i) {
          sum += static_cast<uint32_t>(words[i * stride + w] % base_);
        }
        codes[w] = static_cast<int32_t>(sum);
      }
    } else {
      for (int64_t i = 0; i < num_workers;) {
        const uint32_t* rows = words + i * stride;
        if (num_workers - i >= 4) {
          i += AddRows<4>(rows, stride, size, i > 0, codes);
        } else if (num_workers - i >= 2) {
          i += AddRows<2>(rows, stride, size, i > 0, codes);
        } else {
          i += AddRows<1>(rows, stride, size, i > 0, codes);
        }
      }
    }
  }

  // Whether EachVector() can be called: there are bases with quicker ways.
  bool HasVectors() const { return base_ != 2 && count_ > 1; }

  // The halves of words in turn, with half a unit added, and a vector of zeros.
  void Halve(const uint32_t* words, int64_t size, float* halves) const {
    const D half = SetDoubles(0.5), radix = SetDoubles(radix_);
    const D inverse = SetDoubles(1 / radix_);
    for (int64_t w = 0; w < size; w += 8, halves += 16) {
      uint32_t buffer[8] = {};
      const uint32_t* eight = words + w;
      // Loads the words of the next tile, which most often follow.
      __builtin_prefetch(eight + size);
      if (size - w < 8) {
        eight = static_cast<uint32_t*>(memcpy(buffer, eight, (size - w) * 4));
      }
      const D number = Add(WidenWords(eight), half);
      const D high = Floor(Mul(number, inverse));
      StorePairs(halves, Sub(number, Mul(high, radix)), Add(high, half));
    }
    memset(halves, 0, 16 * sizeof(float));
  }

  // Calls use(v, digits) for the vectors [begin, end) of the digits of some rows of
  // words, which are given by halves.
  template <int Rows, typename Use>
  inline __attribute__((always_inline)) void EachVector(
      const float (&halves)[Rows][kTile + kSlack], int64_t begin, int64_t end,
      const Use& use) const {
    const F base = Set(static_cast<float>(base_));
    int64_t v = begin, at = begin / num_patterns_ * halves_;
    const Pattern* pattern = patterns_ + begin % num_patterns_;
    for (; v < end; at += halves_, pattern = patterns_) {
      const int64_t last = Smaller(end, v + (patterns_ + num_patterns_ - pattern));
      for (; v < last; ++v, ++pattern) {
        I digits[Rows];
        for (int row = 0; row < Rows; ++row) {
          const float* first = halves[row] + at + pattern->first;
          const F half = Pick(first, LoadInts(pattern->half));
          const F quotient = Mul(half, Load(pattern->inverse));
          digits[row] = Truncate(Mul(Fraction(quotient), base));
        }
        use(v, digits);
      }
    }
  }

 private:
  static constexpr int kMost = 48, kMostPatterns = 16;

  // Packs whole words, four at a time; `kFits` if a word's digits fit in a vector.
  template <bool kFits>
  void PackFours(const int32_t* codes, int64_t size, uint32_t* words) const {
    for (int64_t w = 0; w < size; w += 4) {
      I sums[4];
      for (I& sum : sums) {
        sum = Weigh<kFits>(codes);
        codes += count_;
      }
      SumFour(words + w, sums[0], sums[1], sums[2], sums[3]);
    }
  }

  uint32_t PackOne(const int32_t* codes) const {
    if (base_ == 2) {
      uint32_t word = 0;
      EachPart([&](auto part) {
        const I bits = LoadInts(codes + part.kPart * kWidth);
        word |= NonzeroBits(bits) << (part.kPart * kWidth);
      });
      return word;
    }
    return SumInts(Weigh<false>(codes));
  }

  // A vector whose lanes add up to the word of `codes`.
  template <bool kFits>
  I Weigh(const int32_t* codes) const {
    I sum = MulInts(LoadInts(codes), LoadInts(powers_));
    for (int j = kWidth; !kFits && j < count_; j += kWidth) {
      sum = AddInts(sum, MulInts(LoadInts(codes + j), LoadInts(powers_ + j)));
    }
    return sum;
  }

  // A word is cut into a lower and an upper half of its digits, each a number n below
  // 2^22, and digit j of n is floor(base * fraction(n / base^(j + 1))). Exact: with
  // half a unit added to a number, its quotients are farther from the next integer than
  // roundings can carry them, in float64 for a word and in float32 for a half.
  //
  // The lanes of a vector are consecutive digits: lane i is of the half that lies
  // half[i] after the first lane's word, of which it is digit j with inverse[i] =
  // base^-(j + 1). Vectors follow one of a few patterns in turn.
  struct Pattern {
    int64_t first;  // The first lane's word, in halves after the period's.
    int32_t half[kWidth];
    float inverse[kWidth];
  };

  // The patterns of a period, which begins and ends with a word.
  void FillPatterns() {
    const int lower = (count_ + 1) / 2;
    float inverse[kMost];
    radix_ = 1;
    for (int j = 0; j < lower; ++j) {
      radix_ *= static_cast<double>(base_);
      inverse[j] = static_cast<float>(1 / radix_);
    }
    num_patterns_ = 0;
    int element = 0;
    do {
      Pattern& pattern = patterns_[num_patterns_++];
      const int word = element / count_;
      pattern.first = 2 * word;
      for (int i = 0; i < kWidth; ++i, ++element) {
        const int j = element % count_, upper = j >= lower;
        pattern.half[i] = 2 * (element / count_ - word) + upper;
        pattern.inverse[i] = inverse[j - upper * lower];
      }
    } while (element % count_ != 0);
    halves_ = 2 * element / count_;
  }

  // Adds the digits of some rows to `codes`, or stores them. Returns the number of
  // rows.
  template <int Rows>
  int AddRows(const uint32_t* words, int64_t stride, int64_t size, bool adds,
              int32_t* codes) const {
    float halves[Rows][kTile + kSlack];
    for (int row = 0; row < Rows; ++row) Halve(words + row * stride, size, halves[row]);
    EachVector<Rows>(halves, 0, CeilDiv(size * count_, kWidth),
                     [&](int64_t v, const I(&digits)[Rows]) {
                       I sum = adds ? LoadInts(codes + v * kWidth) : SetInts(0);
                       for (const I& digit : digits) sum = AddInts(sum, digit);
                       StoreInts(codes + v * kWidth, sum);
                     });
    return Rows;
  }

  uint64_t base_;
  int count_;
  int32_t powers_[kMost];
  double radix_;               // base^(digits of a lower half)
  int num_patterns_, halves_;  // Of a period.
  Pattern patterns_[kMostPatterns];
};

void Kernel(const Parallel& parallel, const PackCodes& args) {
  const Digits digits(args.base);
  const int64_t tile = CeilDiv(kTile, digits.count());
  const int64_t words = WordsFor(args.size, args.base);
  For(parallel, CeilDiv(words, tile), 4 * tile * digits.count(),
      [&](int64_t begin, int64_t end) {
        const int64_t first = begin * tile * digits.count();
        const int64_t last = Smaller(args.size, end * tile * digits.count());
        digits.Pack(args.codes + first, last - first, args.size - first,
                    args.words + begin * tile);
      });
}

void Kernel(const Parallel& parallel, const UnpackCodes& args) {
  const Digits digits(args.base);
  const int64_t tile = kTile / digits.count();
  const int64_t words = WordsFor(args.size, args.base);
  const int64_t tiles = CeilDiv(words, tile);
  For(parallel, args.rows * tiles, 4 * tile * digits.count(),
      [&](int64_t begin, int64_t end) {
        int32_t codes[kTile + kSlack];
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t row = unit / tiles, word = unit % tiles * tile;
          const int64_t first = word * digits.count();
          digits.Sum(args.words + row * words + word, 1, 0, Smaller(tile, words - word),
                     codes);
          memcpy(args.codes + row * args.size + first, codes,
                 Smaller(tile * digits.count(), args.size - first) * sizeof(int32_t));
        }
      });
}

// Sums of codes use tiles that are whole words of either base.
struct SumTile {
  SumTile(const Digits& in, const Digits& out) {
    const int64_t least = int64_t{in.count()} * out.count();
    elements = least * (least >= kTile ? 1 : kTile / least);
    words_in = elements / in.count();
    words_out = elements / out.count();
  }
  int64_t elements, words_in, words_out;
};

void Kernel(const Parallel& parallel, const SumCodes& args) {
  const Digits in(args.base), out(args.sum_base);
  const SumTile tile(in, out);
  const int64_t words = WordsFor(args.size, args.base);
  For(parallel, CeilDiv(args.size, tile.elements),
      4 * tile.words_in * args.num_workers + 4 * tile.elements,
      [&](int64_t begin, int64_t end) {
        int32_t codes[kTile + kSlack];
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t word = unit * tile.words_in;
          in.Sum(args.words + word, args.num_workers, words,
                 Smaller(tile.words_in, words - word), codes);
          out.Pack(codes, Smaller(tile.elements, args.size - unit * tile.elements),
                   kTile + kSlack, args.sum + unit * tile.words_out);
        }
      });
}

// values = scale * level(at, codes of the group at `at`), for a range of tiles.
template <bool kIsBits>
void LevelsOf(const SumLevels& shared, const Digits& digits, int64_t tile,
              int64_t begin, int64_t end) {
  const SumLevels args = shared;  // A vector store may alias what others can see.
  const int64_t words = WordsFor(args.size, args.base);
  const int64_t elements = tile * digits.count();
  const F minus = Set(static_cast<float>(-args.zero));
  const F plus = Set(static_cast<float>(args.step - args.zero));
  const I step = SetInts(static_cast<int32_t>(args.step));
  const I negative_zero = SetInts(static_cast<int32_t>(-args.zero));
  Spread scale(args.scale, 1, args.row_splits, args.num_blocks);
  ValueWriter values(args.values, args.update, args.size);
  int32_t codes[kTile + kSlack];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * elements;
    const int64_t last = Smaller(args.size, first + elements);
    if (!kIsBits) {
      digits.Sum(args.words + unit * tile, args.num_workers, words,
                 Smaller(tile, words - unit * tile), codes);
    }
    for (int64_t at = first; at < last; at += kGroup) {
      const int64_t count = Smaller(kGroup, last - at);
      const float* s = scale.At(at, count);
      F group[kParts];
      EachPart([&](auto part) {
        constexpr int kFirst = part.kPart * kWidth;
        if constexpr (kIsBits) {
          group[part.kPart] = Select<part.kPart>(args.words[at / kGroup], minus, plus);
        } else {
          const I sum = MulInts(LoadInts(codes + (at - first) + kFirst), step);
          group[part.kPart] = ToFloats(AddInts(sum, negative_zero));
        }
        group[part.kPart] = Mul(Load(s + kFirst), group[part.kPart]);
      });
      values.Put(at, group);
    }
  }
}

void Kernel(const Parallel& parallel, const SumLevels& args) {
  const Digits digits(args.base);
  // A multiple of 32 words, and so of groups.
  const int64_t tile = kGroup * (kTile / kGroup / digits.count());
  const int64_t tiles = CeilDiv(WordsFor(args.size, args.base), tile);
  For(parallel, tiles, 8 * tile * digits.count(), [&](int64_t begin, int64_t end) {
    if (args.base == 2 && args.num_workers == 1) {
      LevelsOf<true>(args, digits, tile, begin, end);
    } else {
      LevelsOf<false>(args, digits, tile, begin, end);
    }
  });
}
