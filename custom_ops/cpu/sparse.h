// Sparse words, and their mean.
//
// A pass over the vector marks the elements that are, or may be, sent, a bit for each.
// Then one thread turns the marks into words: few elements are marked.

// r and v of groups: the accumulated terms, with those of this step.
class Gathered {
 public:
  template <typename Args>
  explicit Gathered(const Args& args)
      : x_(args.x, args.size),
        moments_(args.moments, args.size),
        residual_(args.residual),
        variance_(args.variance) {}

  // Returns the number of elements that are not finite. Without variance v is 0.
  inline __attribute__((always_inline)) int64_t At(int64_t at, int64_t count,
                                                   F (&r)[kParts], F (&v)[kParts]) {
    Sum(residual_reader_.At(residual_ + at, count), x_.At(at, count), r);
    if (variance_ == nullptr) {
      for (F& part : v) part = Set(0);
    } else {
      Sum(variance_reader_.At(variance_ + at, count), moments_.At(at, count), v);
    }
    uint32_t nonfinite = 0;
    for (int part = 0; part < kParts; ++part) {
      nonfinite |= (NonfiniteBits(r[part]) | NonfiniteBits(v[part])) << (part * kWidth);
    }
    return nonfinite == 0 ? 0 : __builtin_popcount(nonfinite);
  }

 private:
  static inline __attribute__((always_inline)) void Sum(const float* a, const float* b,
                                                        F (&sum)[kParts]) {
    for (int part = 0; part < kParts; ++part) {
      sum[part] = Add(Load(a + part * kWidth), Load(b + part * kWidth));
    }
  }

  CutReader<kGroup> x_, moments_;
  GroupReader residual_reader_, variance_reader_;
  const float *residual_, *variance_;
};

// The elements with r * r > alpha * v.
inline uint32_t Unambiguous(F alpha, const F (&r)[kParts], const F (&v)[kParts]) {
  uint32_t bits = 0;
  for (int part = 0; part < kParts; ++part) {
    bits |= LessBits(Mul(alpha, v[part]), Mul(r[part], r[part])) << (part * kWidth);
  }
  return bits;
}

// Calls body(j) for the marked elements of [begin, end).
template <typename Body>
inline void EachMarked(const uint32_t* marks, int64_t begin, int64_t end,
                       const Body& body) {
  for (int64_t word = begin / kGroup; word * kGroup < end; ++word) {
    uint32_t left = marks[word];
    if (left == 0) continue;
    const int64_t first = word * kGroup;
    if (first < begin) left &= ~LowBits(begin - first);
    left &= LowBits(end - first);
    for (; left != 0; left &= left - 1) body(first + __builtin_ctz(left));
  }
}

void Kernel(const Parallel& parallel, const PackUnambiguous& shared) {
  *shared.nonfinite = 0;
  For(parallel, CeilDiv(shared.size, kGroup), 24 * kGroup,
      [&](int64_t begin, int64_t end) {
        const PackUnambiguous args = shared;  // A vector store may alias it.
        const F alpha = Set(args.alpha), decay = Set(args.decay);
        Gathered gathered(args);
        GroupWriter new_residual(args.new_residual, args.size);
        GroupWriter new_variance(args.new_variance, args.size);
        int64_t nonfinite = 0;
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F r[kParts], v[kParts];
          nonfinite += gathered.At(at, count, r, v);
          args.scratch[word] = Unambiguous(alpha, r, v) & LowBits(count);
          for (F& part : v) part = Mul(part, decay);
          new_residual.Put(at, r);
          new_variance.Put(at, v);
        }
        AddCount(args.nonfinite, nonfinite);
      });
  const PackUnambiguous args = shared;
  int64_t sent = 0;
  for (int64_t b = 0; b < args.num_blocks; ++b) {
    const int64_t begin = args.row_splits[b], end = args.row_splits[b + 1];
    uint32_t bits = 0;
    EachMarked(args.scratch, begin, end, [&](int64_t j) {
      const uint32_t magnitude = BitsOf(args.new_residual[j]) & 0x7FFFFFFF;
      if (IsNormal(args.new_residual[j]) && magnitude > bits) bits = magnitude;
    });
    const int exponent = static_cast<int>(bits >> 23) - 127;
    args.exponents[b] = static_cast<int8_t>(bits == 0 ? -128 : exponent);
    if (bits == 0) continue;
    EachMarked(args.scratch, begin, end, [&](int64_t j) {
      const float r = args.new_residual[j];
      const int d = FallOf(r, FloatOf(bits));
      if (!IsNormal(r) || d > kMostFall) return;
      args.words[sent++] = SparseWord(BitsOf(r), d, j);
      args.new_residual[j] = args.new_variance[j] = 0;
    });
  }
  *args.count = sent;
}

void Kernel(const Parallel& parallel, const PackOverThreshold& shared) {
  *shared.nonfinite = 0;
  For(parallel, CeilDiv(shared.size, kGroup), 24 * kGroup,
      [&](int64_t begin, int64_t end) {
        const PackOverThreshold args = shared;  // A vector store may alias it.
        const bool has_variance = args.variance != nullptr;
        const F alpha = Set(args.alpha), decay = Set(args.decay);
        Spread thresholds(args.threshold, 1, args.row_splits, args.num_blocks);
        Gathered gathered(args);
        GroupWriter new_residual(args.new_residual, args.size);
        GroupWriter new_variance(has_variance ? args.new_variance : nullptr, args.size);
        int64_t nonfinite = 0;
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          F r[kParts], v[kParts], t[kParts];
          nonfinite += gathered.At(at, count, r, v);
          LoadGroup(thresholds.At(at, count), t);
          uint32_t sent = 0, minus = 0;
          for (int part = 0; part < kParts; ++part) {
            sent |= LessBits(t[part], Abs(r[part])) << (part * kWidth);
            minus |= MinusBits(r[part]) << (part * kWidth);
          }
          sent &= LowBits(count);
          if (has_variance) sent &= Unambiguous(alpha, r, v);
          args.scratch[word] = sent;
          if (sent != 0) {
            EachPart([&](auto part) {
              F &ri = r[part.kPart], &vi = v[part.kPart];
              const F ti = t[part.kPart], twice = Add(ti, ti);
              const F lower = Add(Sub(vi, Mul(twice, Abs(ri))), Mul(ti, ti));
              vi = Select<part.kPart>(sent, vi, Max(lower, Set(0)));
              const F less = Sub(ri, Negate<part.kPart>(minus, ti));
              ri = Select<part.kPart>(sent, ri, less);
            });
          }
          new_residual.Put(at, r);
          if (!has_variance) continue;
          for (F& part : v) part = Mul(part, decay);
          new_variance.Put(at, v);
        }
        AddCount(args.nonfinite, nonfinite);
      });
  const PackOverThreshold args = shared;
  int64_t sent = 0;
  EachMarked(args.scratch, 0, args.size, [&](int64_t j) {
    // The remainder has the sign of r.
    args.words[sent++] = SparseWord(BitsOf(args.new_residual[j]), 0, j);
  });
  *args.count = sent;
}

// The words of N workers, which one thread reads together.
class SparseRows {
 public:
  // From element `begin` on.
  SparseRows(const MeanOfSparse& args, int64_t begin)
      : args_(args),
        next_(new int64_t[args.num_workers]),
        block_(BlockOf(begin, args.row_splits, args.num_blocks)) {
    for (int64_t i = 0; i < args.num_workers; ++i) {
      const uint32_t* words = args.words + i * args.num_words;
      int64_t low = 0, high = args.num_words;
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (IndexOf(words[middle]) < begin) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      next_[i] = low;
    }
  }
  ~SparseRows() { delete[] next_; }
  SparseRows(const SparseRows&) = delete;
  SparseRows& operator=(const SparseRows&) = delete;

  // Adds elements [begin, end) to `sum`. The next call begins where this one ends.
  void AddTo(float* sum, int64_t begin, int64_t end) {
    while (args_.row_splits[block_ + 1] <= begin) ++block_;
    for (int64_t i = 0; i < args_.num_workers; ++i) {
      const uint32_t* words = args_.words + i * args_.num_words;
      const float* scale = args_.scale + i * args_.num_blocks;
      int64_t block = block_;
      for (; next_[i] < args_.num_words; ++next_[i]) {
        const uint32_t word = words[next_[i]];
        const int64_t j = IndexOf(word);
        if (j >= end) break;
        if (j < begin) continue;  // Out of order: the op on a CPU refuses this before.
        while (args_.row_splits[block + 1] <= j) ++block;
        sum[j - begin] += scale[block] * FactorOf(word);
      }
    }
  }

 private:
  const MeanOfSparse args_;
  int64_t* next_;
  int64_t block_;
};

void Kernel(const Parallel& parallel, const MeanOfSparse& args) {
  For(parallel, CeilDiv(args.size, kTile), 4 * kTile, [&](int64_t begin, int64_t end) {
    const DivideBy divide(args.num_workers);
    SparseRows rows(args, begin * kTile);
    GroupWriter values(args.values, args.size);
    alignas(kCacheLine) float sum[kTile];
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kTile, last = Smaller(args.size, first + kTile);
      memset(sum, 0, sizeof(sum));
      rows.AddTo(sum, first, last);
      for (int64_t at = first; at < last; at += kGroup) {
        F mean[kParts];
        LoadGroup(sum + (at - first), mean);
        for (F& part : mean) part = divide(part);
        values.Put(at, mean);
      }
    }
  });
}
