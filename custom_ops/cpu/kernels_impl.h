// The kernels, written once over the vectors of simd_*.h. Each kernels_<set>.cc
// includes this text after the vectors of its instruction set.
//
// Elements are taken in groups of 32, the elements of a base-2 word; chunks and tiles
// are multiples of that which fit into the first-level cache. The last group of a
// vector goes through a padded buffer, so that there is one path for all lengths.

constexpr int kGroup = 32;
constexpr int kParts = kGroup / kWidth;

// Vectors of floats at least as long go past the caches: by the time that anyone reads
// them they would have been evicted, and no line is read to be overwritten.
constexpr int64_t kStreamedFloats = int64_t{1} << 22;

template <typename Body>
void For(const Parallel& parallel, int64_t units, int64_t bytes_per_unit,
         const Body& body) {
  if (units <= 0) return;
  if (parallel.run == nullptr) return body(int64_t{0}, units);
  parallel.run(
      parallel.pool, units, bytes_per_unit,
      [](void* closure, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(closure))(begin, end);
      },
      const_cast<Body*>(&body));
}

template <int Part>
struct PartOf {
  static constexpr int kPart = Part;
};

// Calls body(PartOf<0>()), ... for the vectors of a group.
template <int Part = 0, typename Body>
inline __attribute__((always_inline)) void EachPart(const Body& body) {
  body(PartOf<Part>());
  if constexpr (Part + 1 < kParts) EachPart<Part + 1>(body);
}

inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline uint32_t LowBits(int64_t count) {
  return count >= 32 ? ~uint32_t{0} : (uint32_t{1} << count) - 1;
}

// A group of a vector for reading: in place, or, where fewer than 32 elements are left,
// in a buffer padded with zeros.
class GroupReader {
 public:
  const float* At(const float* p, int64_t count) {
    if (count >= kGroup) return p;
    memset(buffer_, 0, sizeof(buffer_));
    memcpy(buffer_, p, count * sizeof(float));
    return buffer_;
  }

 private:
  float buffer_[kGroup];
};

// Writes groups of a vector.
class GroupWriter {
 public:
  GroupWriter(float* vector, int64_t size)
      : vector_(vector),
        size_(size),
        streams_(kStreams && size >= kStreamedFloats &&
                 reinterpret_cast<uintptr_t>(vector) % sizeof(F) == 0) {}
  ~GroupWriter() {
    if (streams_) Fence();
  }

  // The group at element `begin`, a multiple of 32.
  inline __attribute__((always_inline)) void Put(int64_t begin,
                                                 const F (&group)[kParts]) {
    float* p = vector_ + begin;
    if (begin + kGroup > size_) {
      float buffer[kGroup];
      for (int part = 0; part < kParts; ++part)
        Store(buffer + part * kWidth, group[part]);
      memcpy(p, buffer, (size_ - begin) * sizeof(float));
    } else if (streams_) {
      for (int part = 0; part < kParts; ++part) Stream(p + part * kWidth, group[part]);
    } else {
      for (int part = 0; part < kParts; ++part) Store(p + part * kWidth, group[part]);
    }
  }

 private:
  float* vector_;
  int64_t size_;
  bool streams_;
};

int64_t BlockOf(int64_t element, const int64_t* row_splits, int64_t num_blocks) {
  int64_t low = 0, high = num_blocks;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (row_splits[middle] <= element) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Per-block values spread over the elements of a group. Within a block nothing is done
// from group to group.
class Spread {
 public:
  // `values` has `rows` rows of num_blocks values.
  Spread(const float* values, int64_t rows, const int64_t* row_splits,
         int64_t num_blocks)
      : values_(values),
        rows_(rows),
        row_splits_(row_splits),
        num_blocks_(num_blocks),
        buffer_(new float[rows * kGroup]) {}
  ~Spread() { delete[] buffer_; }
  Spread(const Spread&) = delete;
  Spread& operator=(const Spread&) = delete;

  // Elements [begin, begin + count), count <= 32: rows of 32 values.
  const float* At(int64_t begin, int64_t count) {
    const int64_t end = begin + count;
    if (begin < begin_ || end > end_) Fill(begin, end);
    return buffer_;
  }

 private:
  __attribute__((noinline)) void Fill(int64_t begin, int64_t end) {
    // Most often it is the next one.
    int64_t block =
        begin == end_ ? block_ + 1 : BlockOf(begin, row_splits_, num_blocks_);
    block_ = block;
    begin_ = row_splits_[block];
    end_ = row_splits_[block + 1];
    if (end <= end_) {
      for (int64_t row = 0; row < rows_; ++row) {
        const float value = values_[row * num_blocks_ + block];
        for (int i = 0; i < kGroup; ++i) buffer_[row * kGroup + i] = value;
      }
      return;
    }
    for (int64_t element = begin; element < end; ++element) {
      if (element >= row_splits_[block + 1]) ++block;
      for (int64_t row = 0; row < rows_; ++row) {
        buffer_[row * kGroup + element - begin] = values_[row * num_blocks_ + block];
      }
    }
    begin_ = end_ = -1;  // It serves this group only.
  }

  const float* values_;
  int64_t rows_;
  const int64_t* row_splits_;
  int64_t num_blocks_;
  int64_t block_ = -1, begin_ = -1, end_ = -1;
  float* buffer_;
};

RandomStream ToStream(const uint64_t* stream) { return {stream[0], stream[1]}; }

// -- Digits -----------------------------------------------------------------------

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
  const Digits in(args.base), out(args.num_workers * (args.base - 1) + 1);
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

// -- Signs ------------------------------------------------------------------------

// The lowest bits of the random words of a group.
inline __attribute__((noinline)) uint32_t Coins(RandomStream stream, int64_t begin) {
  uint32_t words[kGroup];
  RandomWords<1>(RoundKeys(stream), static_cast<uint64_t>(begin) / 4, words);
  uint32_t coins = 0;
  for (int i = 0; i < kGroup; ++i) coins |= (words[i] & 1) << i;
  return coins;
}

// The word of the signs of a group.
inline uint32_t SignWord(const F (&x)[kParts], const uint64_t* stream, int64_t begin) {
  uint32_t minus = 0, zero = 0;
  for (int part = 0; part < kParts; ++part) {
    minus |= MinusBits(x[part]) << (part * kWidth);
    zero |= ZeroBits(x[part]) << (part * kWidth);
  }
  if (stream == nullptr) return ~minus | zero;
  if (zero == 0) return ~minus;
  return (~minus & ~zero) | (Coins(ToStream(stream), begin) & zero);
}

inline __attribute__((always_inline)) void LoadGroup(const float* p,
                                                     F (&group)[kParts]) {
  for (int part = 0; part < kParts; ++part) group[part] = Load(p + part * kWidth);
}

void Kernel(const Parallel& parallel, const PackSigns& args) {
  For(parallel, CeilDiv(args.size, kGroup), 4 * kGroup,
      [&](int64_t begin, int64_t end) {
        GroupReader x;
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F group[kParts];
          LoadGroup(x.At(args.x + at, count), group);
          args.words[word] = SignWord(group, args.stream, at) & LowBits(count);
        }
      });
}

void Kernel(const Parallel& parallel, const PackMomentumSigns& args) {
  const F beta = Set(args.beta), rest = Set(args.one_minus_beta);
  const bool warming_up = *args.warming_up;
  For(parallel, CeilDiv(args.size, kGroup), 12 * kGroup,
      [&](int64_t begin, int64_t end) {
        GroupReader x, momentum;
        GroupWriter new_momentum(args.new_momentum, args.size);
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F g[kParts], m[kParts];
          LoadGroup(x.At(args.x + at, count), g);
          LoadGroup(momentum.At(args.momentum + at, count), m);
          for (int part = 0; part < kParts; ++part) {
            m[part] = Add(Mul(beta, m[part]), Mul(rest, g[part]));
          }
          new_momentum.Put(at, m);
          args.words[word] =
              SignWord(warming_up ? g : m, args.stream, at) & LowBits(count);
        }
      });
}

// Means of N scaled signs.
class SignMean {
 public:
  // `stride` words lie between two workers'.
  SignMean(const uint32_t* words, int64_t num_workers, int64_t stride)
      : words_(words),
        num_workers_(num_workers),
        stride_(stride),
        count_(Set(static_cast<float>(num_workers))),
        reciprocal_(Set(1 / static_cast<float>(num_workers))),
        is_power_of_two_((num_workers & (num_workers - 1)) == 0) {}

  // The group of a word; `scale` has a row of 32 a worker.
  inline __attribute__((always_inline)) void At(int64_t word, const float* scale,
                                                F (&mean)[kParts]) const {
    const uint32_t* words = words_ + word;
    EachPart([&](auto part) {
      mean[part.kPart] = Negate<part.kPart>(~*words, Load(scale + part.kPart * kWidth));
    });
    for (int64_t i = 1; i < num_workers_; ++i) {
      words += stride_;
      scale += kGroup;
      EachPart([&](auto part) {
        const F value = Load(scale + part.kPart * kWidth);
        mean[part.kPart] = Add(mean[part.kPart], Negate<part.kPart>(~*words, value));
      });
    }
    for (int part = 0; part < kParts; ++part) {
      // The same number: the reciprocal of a power of two is exact.
      mean[part] =
          is_power_of_two_ ? Mul(mean[part], reciprocal_) : Div(mean[part], count_);
    }
  }

 private:
  const uint32_t* words_;
  int64_t num_workers_, stride_;
  F count_, reciprocal_;
  bool is_power_of_two_;
};

void Kernel(const Parallel& parallel, const MeanOfSigns& args) {
  const int64_t stride = WordsFor(args.size, 2);
  For(parallel, stride, 4 * kGroup + 4 * args.num_workers,
      [&](int64_t begin, int64_t end) {
        const SignMean signs(args.words, args.num_workers, stride);
        Spread scale(args.scale, args.num_workers, args.row_splits, args.num_blocks);
        GroupWriter values(args.values, args.size);
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F mean[kParts];
          signs.At(word, scale.At(at, count), mean);
          values.Put(at, mean);
        }
      });
}

// Groups that draw random words together; a tile is a multiple of them.
constexpr int kRandomGroups = 4;

void Kernel(const Parallel& parallel, const PackTernary& args) {
  const RoundKeys keys(ToStream(args.stream));
  For(parallel, CeilDiv(args.size, kTernaryTile), 4 * kTernaryTile,
      [&](int64_t begin, int64_t end) {
        Spread limit(args.limit, 1, args.row_splits, args.num_blocks);
        Spread scale(args.scale, 1, args.row_splits, args.num_blocks);
        GroupReader x;
        uint32_t random[kTernaryTile];
        uint32_t plus[kTernaryTile / 32 + 1] = {}, minus[kTernaryTile / 32 + 1] = {};
        for (int64_t tile = begin; tile < end; ++tile) {
          const int64_t first = tile * kTernaryTile;
          const int64_t last = Smaller(args.size, first + kTernaryTile);
          for (int64_t at = first; at < last; at += kRandomGroups * kGroup) {
            RandomWords<kRandomGroups>(keys, static_cast<uint64_t>(at) / 4,
                                       random + (at - first));
            // Meanwhile the memory has time.
            for (int64_t line = 0; line < kRandomGroups * kGroup; line += 16) {
              __builtin_prefetch(args.x + at + line);
            }
          }
          for (int64_t at = first; at < last; at += kGroup) {
            const int64_t count = Smaller(kGroup, last - at);
            const float* p = x.At(args.x + at, count);
            const float* most = limit.At(at, count);
            const float* s = scale.At(at, count);
            const uint32_t* words = random + (at - first);
            uint32_t kept = 0, negative = 0;
            EachPart([&](auto part) {
              constexpr int kFirst = part.kPart * kWidth;
              const F value = Load(p + kFirst);
              const F threshold = Mul(Uniforms(words + kFirst), Load(s + kFirst));
              const F magnitude = Min(Load(most + kFirst), Abs(value));
              kept |= LessBits(threshold, magnitude) << kFirst;
              negative |= MinusBits(value) << kFirst;
            });
            plus[(at - first) / kGroup] = kept & ~negative;
            minus[(at - first) / kGroup] = kept & negative;
          }
          PackTernaryTile(plus, minus, last - first,
                          args.words + first / kTernaryDigits);
        }
      });
}

// -- Votes ------------------------------------------------------------------------

// As many words as a vector has lanes, of which `count` are there.
inline I LoadWords(const uint32_t* words, int64_t count) {
  int32_t buffer[kWidth] = {};
  memcpy(buffer, words, Smaller(kWidth, count) * sizeof(uint32_t));
  return LoadInts(buffer);
}

// Votes of base-2 words, 32 a lane: the numbers of plus signs are added bit-sliced, bit
// k of all counts in one word.
class SlicedVote {
 public:
  SlicedVote(const uint32_t* words, int64_t num_workers, int64_t stride)
      : words_(words), num_workers_(num_workers), stride_(stride) {
    while (num_workers >> planes_) ++planes_;
  }

  // Where the number of plus signs is above half, and where it is just half.
  void At(int64_t word, I* above, I* tied) const {
    I planes[64];
    for (int k = 0; k < planes_; ++k) planes[k] = SetInts(0);
    for (int64_t i = 0; i < num_workers_; ++i) {
      I carry = LoadWords(words_ + i * stride_ + word, stride_ - word);
      // i + 1 signs fill no higher plane than these.
      for (int k = 0; (i + 1) >> k; ++k) {
        const I sum = Xor(planes[k], carry);
        carry = And(planes[k], carry);
        planes[k] = sum;
      }
    }
    const int64_t half = num_workers_ / 2;
    I more = SetInts(0), equal = SetInts(-1);
    for (int k = planes_ - 1; k >= 0; --k) {
      if (half >> k & 1) {
        equal = And(equal, planes[k]);
      } else {
        more = Or(more, And(equal, planes[k]));
        equal = AndNot(equal, planes[k]);
      }
    }
    *above = more;
    *tied = num_workers_ % 2 ? SetInts(0) : equal;
  }

 private:
  const uint32_t* words_;
  int64_t num_workers_, stride_;
  int planes_ = 0;
};

void VoteBySlices(const Parallel& parallel, const MajorityVote& args) {
  const int64_t stride = WordsFor(args.size, 2);
  const SlicedVote vote(args.words, args.num_workers, stride);
  constexpr int64_t kTileWords = kTernaryTile / kGroup;
  For(parallel, CeilDiv(stride, kTileWords), 4 * kTileWords * (args.num_workers + 1),
      [&](int64_t begin, int64_t end) {
        int32_t plus[kTileWords + kWidth] = {}, tied[kTileWords + kWidth] = {};
        for (int64_t tile = begin; tile < end; ++tile) {
          const int64_t first = tile * kTileWords;
          const int64_t words = Smaller(kTileWords, stride - first);
          for (int64_t w = 0; w < words; w += kWidth) {
            I above, equal;
            vote.At(first + w, &above, &equal);
            StoreInts(plus + w, above);
            StoreInts(tied + w, equal);
          }
          for (int64_t w = 0; w < words; ++w) {
            if (args.stream != nullptr && tied[w] != 0) {
              const uint32_t coins = Coins(ToStream(args.stream), (first + w) * kGroup);
              plus[w] |= tied[w] & static_cast<int32_t>(coins);
              tied[w] = 0;
            }
            const uint32_t minus = ~static_cast<uint32_t>(plus[w] | tied[w]);
            tied[w] = static_cast<int32_t>(minus);
          }
          const int64_t count = Smaller(kTernaryTile, args.size - first * kGroup);
          const uint32_t* bits = reinterpret_cast<const uint32_t*>(plus);
          if (args.reply_base == 2) {
            memcpy(args.votes + first, bits, words * sizeof(uint32_t));
            args.votes[first + words - 1] &= LowBits(count - (words - 1) * kGroup);
          } else {
            PackTernaryTile(bits, reinterpret_cast<const uint32_t*>(tied), count,
                            args.votes + first * kGroup / kTernaryDigits);
          }
        }
      });
}

// Turns the sums of a group's codes into the codes of its votes.
void VoteOfGroup(const MajorityVote& args, int32_t step, int64_t begin, int64_t count,
                 int32_t* codes) {
  const int32_t num_workers = static_cast<int32_t>(args.num_workers);
  const int32_t quorum = args.reply_base == 3 ? static_cast<int32_t>(args.quorum) : 0;
  int32_t net[kGroup], coins[kGroup] = {};
  bool tied = false;
  for (int i = 0; i < count; ++i) {
    net[i] = step * codes[i] - num_workers;
    tied |= net[i] == 0;
  }
  if (tied && args.stream != nullptr) {
    const uint32_t bits = Coins(ToStream(args.stream), begin);
    for (int i = 0; i < kGroup; ++i) coins[i] = (bits >> i & 1) ? 1 : -1;
  }
  for (int i = 0; i < count; ++i) {
    int32_t vote = (net[i] > 0) - (net[i] < 0);
    vote = net[i] == 0 ? coins[i] : vote;
    vote = net[i] < quorum && -net[i] < quorum ? 0 : vote;
    codes[i] = args.reply_base == 2 ? (vote > 0) : vote + 1;
  }
}

void VoteByCodes(const Parallel& parallel, const MajorityVote& args) {
  const Digits in(args.base), out(args.reply_base);
  const SumTile tile(in, out);
  const int64_t words = WordsFor(args.size, args.base);
  const int32_t step = args.base == 2 ? 2 : 1;
  For(parallel, CeilDiv(args.size, tile.elements), 8 * tile.elements,
      [&](int64_t begin, int64_t end) {
        int32_t codes[kTile + kSlack];
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t first = unit * tile.elements, word = unit * tile.words_in;
          const int64_t count = Smaller(tile.elements, args.size - first);
          in.Sum(args.words + word, args.num_workers, words,
                 Smaller(tile.words_in, words - word), codes);
          for (int64_t j = 0; j < count; j += kGroup) {
            VoteOfGroup(args, step, first + j, Smaller(kGroup, count - j), codes + j);
          }
          out.Pack(codes, count, kTile + kSlack, args.votes + unit * tile.words_out);
        }
      });
}

void Kernel(const Parallel& parallel, const MajorityVote& args) {
  const bool has_quorum = args.reply_base == 3 && args.quorum > 0;
  if (args.base == 2 && !has_quorum) {
    VoteBySlices(parallel, args);
  } else {
    VoteByCodes(parallel, args);
  }
}

// -- Blocks -----------------------------------------------------------------------

// A function of a chunk's rows, added in adjacent pairs.
template <int Rows, typename RowOf>
inline __attribute__((always_inline)) auto SumRows(const float* p,
                                                   const RowOf& row_of) {
  if constexpr (Rows == 1) {
    return row_of(p);
  } else {
    const auto left = SumRows<Rows / 2>(p, row_of);
    return left + SumRows<Rows / 2>(p + Rows / 2 * kLanes, row_of);
  }
}

struct Magnitudes {
  D l1;
  Magnitudes operator+(const Magnitudes& other) const { return {Add(l1, other.l1)}; }
};

// Adds the magnitudes of four rows, a group, as two steps of that order do.
inline D MagnitudeOfGroup(const F (&group)[kParts]) {
  D rows[kGroup / kLanes];
  for (int row = 0; row < kGroup / kLanes; ++row) {
    rows[row] = Abs(WidenRow(group, row));
  }
  return Add(Add(rows[0], rows[1]), Add(rows[2], rows[3]));
}

// The other steps, over the groups of a chunk.
template <int Groups = kChunk / kGroup>
inline D SumGroups(const D* groups) {
  if constexpr (Groups == 1) {
    return *groups;
  } else {
    return Add(SumGroups<Groups / 2>(groups),
               SumGroups<Groups / 2>(groups + Groups / 2));
  }
}

inline double MagnitudeOfChunk(const float* p) {
  const Magnitudes rows =
      SumRows<kRows>(p, [](const float* row) { return Magnitudes{Abs(Widen(row))}; });
  return SumLanes(rows.l1);
}

struct Moments {
  D l1, squares, sum;
  Moments operator+(const Moments& other) const {
    return {Add(l1, other.l1), Add(squares, other.squares), Add(sum, other.sum)};
  }
};

// Calls sum(p, slot) with the 512 elements of each chunk of [begin, end) and each block
// in it, zeros where others lie.
template <typename Sum>
inline void EachChunk(const float* x, int64_t size, const int64_t* row_splits,
                      int64_t num_blocks, int64_t begin, int64_t end, const Sum& sum) {
  int64_t block = BlockOf(begin * kChunk, row_splits, num_blocks);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = chunk * kChunk, last = Smaller(size, first + kChunk);
    while (row_splits[block + 1] <= first) ++block;
    if (first + kChunk <= row_splits[block + 1] && first >= row_splits[block]) {
      sum(x + first, chunk + block);
      continue;
    }
    for (int64_t b = block; b < num_blocks && row_splits[b] < last; ++b) {
      const int64_t from = row_splits[b] > first ? row_splits[b] : first;
      const int64_t to = Smaller(row_splits[b + 1], last);
      float buffer[kChunk] = {};
      memcpy(buffer + (from - first), x + from, (to - from) * sizeof(float));
      sum(buffer, chunk + b);
    }
  }
}

// Combines a block's slots in adjacent pairs, in place.
template <typename Combine>
inline double OverChunks(double* scratch, const int64_t* row_splits, int64_t block,
                         const Combine& combine) {
  const int64_t first = row_splits[block] / kChunk;
  double* slots = scratch + first + block;
  int64_t count = (row_splits[block + 1] - 1) / kChunk - first + 1;
  for (; count > 1; count = (count + 1) / 2) {
    for (int64_t i = 0; i < count / 2; ++i) {
      slots[i] = combine(slots[2 * i], slots[2 * i + 1]);
    }
    if (count % 2) slots[count / 2] = slots[count - 1];
  }
  return slots[0];
}

inline double Plus(double a, double b) { return a + b; }
inline double Larger(double a, double b) { return a > b || a != a ? a : b; }

void Kernel(const Parallel& parallel, const BlockStatistics& args) {
  const int64_t slots = SlotsFor(args.size, args.num_blocks);
  double* const largest = args.scratch;
  double* const l1 = largest + slots;
  double* const squares = l1 + slots;
  double* const sum = squares + slots;
  double* const nonfinite = sum + slots;
  For(parallel, CeilDiv(args.size, kChunk), 4 * kChunk,
      [&](int64_t begin, int64_t end) {
        EachChunk(args.x, args.size, args.row_splits, args.num_blocks, begin, end,
                  [&](const float* p, int64_t slot) {
                    const Moments rows = SumRows<kRows>(p, [](const float* row) {
                      const D value = Widen(row);
                      return Moments{Abs(value), Mul(value, value), value};
                    });
                    l1[slot] = SumLanes(rows.l1);
                    squares[slot] = SumLanes(rows.squares);
                    sum[slot] = SumLanes(rows.sum);
                    I most = SetInts(0);
                    for (int i = 0; i < kChunk; i += kWidth) {
                      most = MaxInts(most, MagnitudeBits(Load(p + i)));
                    }
                    int32_t lanes[kWidth];
                    StoreInts(lanes, most);
                    int32_t bits = 0;
                    for (int32_t lane : lanes) bits = lane > bits ? lane : bits;
                    float magnitude;
                    memcpy(&magnitude, &bits, sizeof(magnitude));
                    largest[slot] = magnitude;
                    int64_t count = 0;
                    constexpr int32_t kInfinity = 0x7F800000;
                    for (int i = 0; bits >= kInfinity && i < kChunk; ++i) {
                      count += (BitsOf(p[i]) & 0x7FFFFFFF) >= kInfinity;
                    }
                    nonfinite[slot] = static_cast<double>(count);
                  });
      });
  For(parallel, args.num_blocks, 40, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      double* const results[] = {largest, l1, squares, sum, nonfinite};
      for (int s = 0; s < 5; ++s) {
        const double value = s == 0 ? OverChunks(results[s], args.row_splits, b, Larger)
                                    : OverChunks(results[s], args.row_splits, b, Plus);
        args.statistics[s * args.num_blocks + b] = value + 0.0;
      }
    }
  });
}

// -- Error feedback ---------------------------------------------------------------

// Blocks are taken in batches of about this many elements: the second pass, which takes
// the scale out of p, then finds p in the cache. A larger block is a batch by itself.
constexpr int64_t kBatch = int64_t{1} << 16;

// Into the cache, where the second pass will look for it.
inline __attribute__((always_inline)) void PutCached(float* p, int64_t count,
                                                     const F (&group)[kParts]) {
  float buffer[kGroup];
  float* target = count < kGroup ? buffer : p;
  for (int part = 0; part < kParts; ++part) Store(target + part * kWidth, group[part]);
  if (count < kGroup) memcpy(p, buffer, count * sizeof(float));
}

// new_residual holds p: takes the scaled signs out of it, or puts back the old one.
template <typename Args>
inline __attribute__((always_inline)) void TakeOut(const Args& args, bool moving,
                                                   int64_t at, int64_t count,
                                                   uint32_t word, const float* scale) {
  float* p = args.new_residual + at;
  if (!moving) {
    memcpy(p, args.residual + at, count * sizeof(float));
    return;
  }
  GroupReader reader;
  const float* values = reader.At(p, count);
  F left[kParts];
  EachPart([&](auto part) {
    constexpr int kFirst = part.kPart * kWidth;
    const F sent = Negate<part.kPart>(~word, Load(scale + kFirst));
    left[part.kPart] = Sub(Load(values + kFirst), sent);
  });
  PutCached(p, count, left);
}

// What SignErrorFeedback and MeanSignErrorFeedback share. `input_at(begin, end)`
// returns a function that makes p of a group: p(at, count, residual, group).
template <typename Args, typename InputAt>
void FeedBack(const Parallel& parallel, const Args& shared, int64_t bytes_per_chunk,
              const InputAt& input_at) {
  const Args args = shared;
  const bool moving = *args.moving;
  const F ratio = Set(*args.ratio);
  int64_t done = 0;
  for (int64_t first = 0, last; first < args.num_blocks; first = last) {
    const int64_t from = args.row_splits[first];
    last = first + 1;
    while (last < args.num_blocks && args.row_splits[last + 1] - from <= kBatch) ++last;
    const int64_t to = args.row_splits[last];
    const int64_t chunks = CeilDiv(to, kChunk);
    For(parallel, chunks - done, bytes_per_chunk, [&](int64_t begin, int64_t end) {
      const Args args = shared;  // A vector store may alias what others can see.
      auto input = input_at();
      GroupReader residual;
      int64_t block =
          BlockOf((done + begin) * kChunk, args.row_splits, args.num_blocks);
      for (int64_t chunk = done + begin; chunk < done + end; ++chunk) {
        const int64_t stop = Smaller(args.size, (chunk + 1) * kChunk);
        while (args.row_splits[block + 1] <= chunk * kChunk) ++block;
        D magnitudes[kChunk / kGroup] = {};
        for (int64_t at = chunk * kChunk; at < stop; at += kGroup) {
          const int64_t count = Smaller(kGroup, stop - at);
          F p[kParts];
          input(at, count, p);
          const float* e = residual.At(args.residual + at, count);
          for (int part = 0; part < kParts; ++part) {
            p[part] = Add(p[part], Mul(ratio, Load(e + part * kWidth)));
          }
          args.words[at / kGroup] = SignWord(p, nullptr, at) & LowBits(count);
          PutCached(args.new_residual + at, count, p);
          magnitudes[at / kGroup % (kChunk / kGroup)] = MagnitudeOfGroup(p);
        }
        if ((chunk + 1) * kChunk <= args.row_splits[block + 1]) {
          args.scratch[chunk + block] = SumLanes(SumGroups(magnitudes));
          continue;
        }
        EachChunk(args.new_residual, args.size, args.row_splits, args.num_blocks, chunk,
                  chunk + 1, [&](const float* values, int64_t slot) {
                    args.scratch[slot] = MagnitudeOfChunk(values);
                  });
      }
    });
    done = chunks;
    for (int64_t b = first; b < last; ++b) {
      const int64_t size = args.row_splits[b + 1] - args.row_splits[b];
      args.scale[b] =
          static_cast<float>(OverChunks(args.scratch, args.row_splits, b, Plus) /
                             static_cast<double>(size));
    }
    const int64_t first_group = from / kGroup;
    For(parallel, CeilDiv(to, kGroup) - first_group, 8 * kGroup,
        [&](int64_t begin, int64_t end) {
          const Args args = shared;
          Spread scale(args.scale, 1, args.row_splits, args.num_blocks);
          for (int64_t word = first_group + begin; word < first_group + end; ++word) {
            const int64_t at = from > word * kGroup ? from : word * kGroup;
            const int64_t count = Smaller(to, (word + 1) * kGroup) - at;
            TakeOut(args, moving, at, count, args.words[word] >> (at - word * kGroup),
                    scale.At(at, count));
          }
        });
  }
}

void Kernel(const Parallel& parallel, const SignErrorFeedback& args) {
  const F mu = Set(args.mu);
  FeedBack(parallel, args, 20 * kChunk, [&] {
    return [&, x = GroupReader(), momentum = GroupReader(),
            new_momentum = GroupWriter(args.new_momentum, args.size)](
               int64_t at, int64_t count, F(&p)[kParts]) mutable {
      LoadGroup(x.At(args.x + at, count), p);
      if (args.momentum == nullptr) return;
      const float* old = momentum.At(args.momentum + at, count);
      F m[kParts];
      for (int part = 0; part < kParts; ++part) {
        m[part] = Add(Mul(mu, Load(old + part * kWidth)), p[part]);
        p[part] = Add(Mul(mu, m[part]), p[part]);
      }
      new_momentum.Put(at, m);
    };
  });
}

void Kernel(const Parallel& parallel, const MeanSignErrorFeedback& args) {
  const SignMean signs(args.sent_words, args.num_workers, WordsFor(args.size, 2));
  FeedBack(parallel, args, (12 + args.num_workers / 8) * kChunk, [&] {
    return [&, scale = Spread(args.sent_scale, args.num_workers, args.row_splits,
                              args.num_blocks)](int64_t at, int64_t count,
                                                F(&p)[kParts]) mutable {
      signs.At(at / kGroup, scale.At(at, count), p);
    };
  });
}
