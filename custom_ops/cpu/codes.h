// Codes of any base: digits in words, and sums of them.

// Base 3 goes by masks: V(mask) is the sum of 3^j over the bits j of a 20-bit mask, and
// the word of codes that are all 1 but for +1 at `plus` and -1 at `minus` is V(all) +
// V(plus) - V(minus).
struct TernaryTables {
  uint32_t low[1 << 10], high[1 << 10];  // V of the lower and the upper ten bits.
  uint64_t five[243];                    // Five digits of base 3, a byte each.

  constexpr TernaryTables() : low(), high(), five() {
    for (uint32_t mask = 0; mask < 1 << 10; ++mask) {
      uint32_t power = 1;
      for (int j = 0; j < 10; ++j, power *= 3) {
        if (mask >> j & 1) low[mask] += power;
      }
      high[mask] = low[mask] * power;
    }
    for (uint32_t number = 0; number < 243; ++number) {
      uint32_t rest = number;
      for (int j = 0; j < 5; ++j, rest /= 3)
        five[number] |= uint64_t{rest % 3} << (8 * j);
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

// A tile whose signs are words of 32 bits and whose codes are words of 20 digits.
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
// Room for vectors that begin at the last code.
constexpr int64_t kSlack = 32;

// Packs and unpacks digits of one base.
class Digits {
 public:
  explicit Digits(uint64_t base) : base_(base), count_(DigitsPerWord(base)) {
    double power = 1;
    for (int j = 0; j < kMost; ++j, power *= static_cast<double>(base)) {
      powers_[j] = j < count_ ? static_cast<int32_t>(static_cast<uint32_t>(power)) : 0;
      inverse_[j] = 1 / power;
    }
  }
  int count() const { return count_; }

  // Words of `size` codes. Codes can be read up to `readable`, which is >= size.
  void Pack(const int32_t* codes, int64_t size, int64_t readable,
            uint32_t* words) const {
    const int64_t padded = CeilDiv(count_, kWidth) * kWidth;
    for (int64_t first = 0, w = 0; first < size; first += count_, ++w) {
      if (size - first >= count_ && readable - first >= padded) {
        words[w] = PackOne(codes + first);
      } else {
        int32_t buffer[kMost] = {};
        memcpy(buffer, codes + first, Smaller(count_, size - first) * sizeof(int32_t));
        words[w] = PackOne(buffer);
      }
    }
  }

  // Sums of the digits of N words, for each of `size` words; `stride` words lie between
  // two workers'. Writes kSlack integers past the codes.
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
    } else if (base_ == 3 && num_workers <= 127) {
      SumTernary(words, num_workers, stride, size, codes);
    } else {
      for (int64_t w = 0; w < size; ++w, codes += count_) {
        for (int j = 0; j < count_; j += 8) {
          D sum = SetDoubles(0);
          for (int64_t i = 0; i < num_workers; ++i) {
            sum = Add(sum, EightDigits(words[i * stride + w], j));
          }
          StoreAsInts(codes + j, sum);
        }
      }
    }
  }

 private:
  static constexpr int kMost = 48;

  uint32_t PackOne(const int32_t* codes) const {
    if (base_ == 2) {
      uint32_t word = 0;
      EachPart([&](auto part) {
        const I bits = LoadInts(codes + part.kPart * kWidth);
        word |= NonzeroBits(bits) << (part.kPart * kWidth);
      });
      return word;
    }
    I sum = MulInts(LoadInts(codes), LoadInts(powers_));
    for (int j = kWidth; j < count_; j += kWidth) {
      sum = AddInts(sum, MulInts(LoadInts(codes + j), LoadInts(powers_ + j)));
    }
    return SumInts(sum);
  }

  // Words of base 3 are cut into fours of five digits; a table has these as bytes, and
  // bytes are added without carry. All are cut before the first is looked up, so that
  // the long chains of cutting overlap.
  static void SumTernary(const uint32_t* words, int64_t num_workers, int64_t stride,
                         int64_t size, int32_t* codes) {
    constexpr int64_t kMostWords = CeilDiv(kTile, kTernaryDigits * 8) * 8;
    int32_t fives[4][kMostWords];
    uint64_t sums[4][kMostWords];
    for (int64_t i = 0; i < num_workers; ++i, words += stride) {
      for (int64_t w = 0; w < size; w += 8) {
        uint32_t buffer[8] = {};
        const uint32_t* eight = words + w;
        if (size - w < 8) {
          eight = static_cast<uint32_t*>(memcpy(buffer, eight, (size - w) * 4));
        }
        const D number = WidenWords(eight);
        const D high =
            Floor(Mul(Add(number, SetDoubles(0.5)), SetDoubles(1.0 / 59049)));
        SplitTen(Sub(number, Mul(high, SetDoubles(59049))), fives[0] + w, fives[1] + w);
        SplitTen(high, fives[2] + w, fives[3] + w);
      }
      if (num_workers == 1) break;
      for (int j = 0; j < 4; ++j) {
        for (int64_t w = 0; w < size; ++w) {
          const uint64_t digits = kTernary.five[fives[j][w]];
          sums[j][w] = i == 0 ? digits : sums[j][w] + digits;
        }
      }
    }
    for (int64_t w = 0; w < size; ++w, codes += kTernaryDigits) {
      for (int j = 0; j < 4; ++j) {
        StoreBytes(codes + 5 * j,
                   num_workers == 1 ? &kTernary.five[fives[j][w]] : &sums[j][w]);
      }
    }
  }

  // Ten digits of base 3 into twice five. Exact, as EightDigits.
  static void SplitTen(D ten, int32_t* low, int32_t* high) {
    const D quotient = Floor(Mul(Add(ten, SetDoubles(0.5)), SetDoubles(1.0 / 243)));
    StoreAsInts(low, Sub(ten, Mul(quotient, SetDoubles(243))));
    StoreAsInts(high, quotient);
  }

  // Digits j to j + 7 of a word, 0 past the last one. Exact: with half a unit added, a
  // quotient is farther from the next integer than two roundings can carry it.
  D EightDigits(uint32_t word, int j) const {
    const D number = SetDoubles(word + 0.5);
    const D here = Floor(Mul(number, LoadDoubles(inverse_ + j)));
    const D next = Floor(Mul(number, LoadDoubles(inverse_ + j + 1)));
    return Sub(here, Mul(next, SetDoubles(static_cast<double>(base_))));
  }

  uint64_t base_;
  int count_;
  int32_t powers_[kMost];
  double inverse_[kMost];
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

// Sums of codes and words of another base share a tile that ends a word of either.
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
  GroupReader addend;
  GroupWriter values(args.values, args.size);
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
      if (args.addend != nullptr) {
        const float* more = addend.At(args.addend + at, count);
        for (int part = 0; part < kParts; ++part) {
          group[part] = Add(group[part], Load(more + part * kWidth));
        }
      }
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
