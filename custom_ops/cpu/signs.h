// Signs of one bit and scaled signs.

// The word of the signs of a group.
inline uint32_t SignWord(const F (&x)[kParts], CoinReader* coins, int64_t begin) {
  uint32_t minus = 0, zero = 0;
  for (int part = 0; part < kParts; ++part) {
    minus |= MinusBits(x[part]) << (part * kWidth);
    zero |= ZeroBits(x[part]) << (part * kWidth);
  }
  if (coins == nullptr) return ~minus | zero;
  if (zero == 0) return ~minus;
  return (~minus & ~zero) | (coins->At(begin) & zero);
}

inline __attribute__((always_inline)) void LoadGroup(const float* p,
                                                     F (&group)[kParts]) {
  for (int part = 0; part < kParts; ++part) group[part] = Load(p + part * kWidth);
}

// The number of elements of a group that are infinite or NaN.
inline int64_t CountNonfinite(const F (&x)[kParts]) {
  uint32_t nonfinite = 0;
  for (int part = 0; part < kParts; ++part) {
    nonfinite |= NonfiniteBits(x[part]) << (part * kWidth);
  }
  return nonfinite == 0 ? 0 : __builtin_popcount(nonfinite);
}

// Adds a thread's count. Sums of integers do not depend on the order of threads.
inline void AddCount(int64_t* total, int64_t count) {
  __atomic_fetch_add(total, count, __ATOMIC_RELAXED);
}

// Calls a function of a worker, one for each thread, with each block, and adds up the
// numbers that it returns: those of infinite elements and NaN.
template <typename Worker, typename Args>
void CountByBlock(const Parallel& parallel, const Args& args,
                  int64_t (Worker::*function)(int64_t)) {
  *args.nonfinite = 0;
  const int64_t width = args.size / (args.num_blocks > 0 ? args.num_blocks : 1);
  For(parallel, args.num_blocks, 8 * width, [&](int64_t begin, int64_t end) {
    Worker worker(args);
    int64_t nonfinite = 0;
    for (int64_t block = begin; block < end; ++block) {
      nonfinite += (worker.*function)(block);
    }
    AddCount(args.nonfinite, nonfinite);
  });
}

void Kernel(const Parallel& parallel, const PackSigns& args) {
  *args.nonfinite = 0;
  For(parallel, CeilDiv(args.size, kGroup), 4 * kGroup,
      [&](int64_t begin, int64_t end) {
        CutReader<kGroup> x(args.x, args.size);
        CoinReader reader(args.stream), *coins = args.stream ? &reader : nullptr;
        int64_t nonfinite = 0;
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F group[kParts];
          LoadGroup(x.At(at, count), group);
          nonfinite += CountNonfinite(group);
          args.words[word] = SignWord(group, coins, at) & LowBits(count);
        }
        AddCount(args.nonfinite, nonfinite);
      });
}

void Kernel(const Parallel& parallel, const PackMomentumSigns& args) {
  const F beta = Set(args.beta), rest = Set(args.one_minus_beta);
  const bool warming_up = *args.warming_up;
  *args.nonfinite = 0;
  For(parallel, CeilDiv(args.size, kGroup), 12 * kGroup,
      [&](int64_t begin, int64_t end) {
        CutReader<kGroup> x(args.x, args.size);
        GroupReader momentum;
        GroupWriter new_momentum(args.new_momentum, args.size);
        CoinReader reader(args.stream), *coins = args.stream ? &reader : nullptr;
        int64_t nonfinite = 0;
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F g[kParts], m[kParts];
          LoadGroup(x.At(at, count), g);
          LoadGroup(momentum.At(args.momentum + at, count), m);
          for (int part = 0; part < kParts; ++part) {
            m[part] = Add(Mul(beta, m[part]), Mul(rest, g[part]));
          }
          new_momentum.Put(at, m);
          nonfinite += CountNonfinite(m);
          const F(&signs)[kParts] = warming_up ? g : m;
          args.words[word] = SignWord(signs, coins, at) & LowBits(count);
        }
        AddCount(args.nonfinite, nonfinite);
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
        divide_(num_workers) {}

  // The group of a word; `scale` has a row of 32 for each worker.
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
    for (F& part : mean) part = divide_(part);
  }

 private:
  const uint32_t* words_;
  int64_t num_workers_, stride_;
  DivideBy divide_;
};

void Kernel(const Parallel& parallel, const MeanOfSigns& args) {
  const int64_t stride = WordsFor(args.size, 2);
  For(parallel, stride, 4 * kGroup + 4 * args.num_workers,
      [&](int64_t begin, int64_t end) {
        const SignMean signs(args.words, args.num_workers, stride);
        Spread scale(args.scale, args.num_workers, args.row_splits, args.num_blocks);
        ValueWriter values(args.values, args.update, args.size);
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F mean[kParts];
          signs.At(word, scale.At(at, count), mean);
          values.Put(at, mean);
        }
      });
}
