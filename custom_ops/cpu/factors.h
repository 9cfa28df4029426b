// Products of two factors, and orthonormal factors.

// -- P Q^T ------------------------------------------------------------------------

constexpr int kRowsTaken = 4;  // At a time.
// How many elements behind those that are taken to prefetch.
constexpr int64_t kTakenAhead = 8 * kSpan;

// Where a piece of a row's elements is taken to: each class of rows below has so many
// vectors of them.
template <int Vectors>
struct PieceOfRow {
  float* p[Vectors];
};

// Rows of a product that are written.
class WrittenRows {
 public:
  static constexpr int kVectors = 1, kWritten = 1;
  static constexpr bool kCanStream = true;
  using Piece = PieceOfRow<kVectors>;

  explicit WrittenRows(const MultiplyFactors& args)
      : step(), streams(IsStreamed(args.size)), pieces_(args.values, args.size) {}

  Piece At(int i, int64_t begin, int64_t count) {
    return {{pieces_.ToWrite(i, begin, count)}};
  }
  void Took(int i, const Piece& piece, int64_t begin, int64_t count) {
    pieces_.Wrote(i, piece.p[0], begin, count);
  }

  struct Step {
    template <bool kStreams>
    inline __attribute__((always_inline)) void Take(const Piece& to, int64_t i,
                                                    F v) const {
      kStreams ? Stream(to.p[0] + i, v) : Store(to.p[0] + i, v);
    }
  };
  const Step step;
  const bool streams;  // Whether vectors are written past the caches.

 private:
  Pieces<float, kRowsTaken, kSpan> pieces_;
};

// Rows that are subtracted from x.
class SubtractedRows {
 public:
  static constexpr int kVectors = 2, kWritten = 1;
  static constexpr bool kCanStream = true;
  using Piece = PieceOfRow<kVectors>;

  explicit SubtractedRows(const SubtractFactors& args)
      : step(),
        streams(IsStreamed(args.size) && args.difference != args.x),
        args_(args) {}

  Piece At(int, int64_t begin, int64_t) {
    // x is read alone.
    return {{args_.difference + begin, const_cast<float*>(args_.x) + begin}};
  }
  void Took(int, const Piece&, int64_t, int64_t) {}

  struct Step {
    template <bool kStreams>
    inline __attribute__((always_inline)) void Take(const Piece& to, int64_t i,
                                                    F v) const {
      const F difference = Sub(Load(to.p[1] + i), v);
      kStreams ? Stream(to.p[0] + i, difference) : Store(to.p[0] + i, difference);
    }
  };
  const Step step;
  const bool streams;

 private:
  const SubtractFactors args_;
};

// Rows that an update takes.
template <UpdateRule kRule>
class AppliedRows {
 public:
  static constexpr int kVectors = VectorsOf(kRule) + HasFloors(kRule);
  static constexpr int kWritten = kVectors;
  static constexpr bool kCanStream = false;
  using Piece = PieceOfRow<kVectors>;

  explicit AppliedRows(const MultiplyFactors& args)
      : step(*args.update),
        update_(*args.update),
        parts_(update_.w, args.size),
        w_(update_.w, args.size),
        m_(update_.m, args.size),
        v_(update_.v, args.size) {}

  Piece At(int i, int64_t begin, int64_t count) {
    if (update_.decays != nullptr || HasFloors(kRule)) {
      parts_.EachPiece(begin, begin + count, [&](float* w, int64_t at, int64_t number) {
        Decay(update_, parts_.index(), w, number);
        if constexpr (HasFloors(kRule)) {
          Floor(update_, parts_.index(), floors_[i] + (at - begin), number);
        }
      });
    }
    Piece piece = {{w_.ToRead(i, begin, count)}};
    if constexpr (kVectors > 1) piece.p[1] = m_.ToRead(i, begin, count);
    if constexpr (kVectors > 2) piece.p[2] = v_.ToRead(i, begin, count);
    if constexpr (HasFloors(kRule)) piece.p[3] = floors_[i];
    return piece;
  }
  void Took(int i, const Piece& piece, int64_t begin, int64_t count) {
    w_.Wrote(i, piece.p[0], begin, count);
    if constexpr (kVectors > 1) m_.Wrote(i, piece.p[1], begin, count);
    if constexpr (kVectors > 2) v_.Wrote(i, piece.p[2], begin, count);
  }

  struct Step {
    explicit Step(const Update& update) { Coefficients(update, c); }

    template <bool kStreams>
    inline __attribute__((always_inline)) void Take(const Piece& to, int64_t i,
                                                    F u) const {
      float* p[4] = {};
      for (int vector = 0; vector < kVectors; ++vector) p[vector] = to.p[vector] + i;
      StepVector<kRule>(c, u, p[0], p[1], p[2], p[3]);
    }

    F c[4];
  };
  const Step step;
  static constexpr bool streams = false;

 private:
  const Update& update_;
  PartOfVector<float> parts_;
  Pieces<float, kRowsTaken, kSpan> w_, m_, v_;
  float floors_[HasFloors(kRule) ? kRowsTaken : 1][kSpan];
};

// Takes the last `count` elements of a piece, fewer than a vector, from element i on.
template <typename Rows>
__attribute__((noinline)) void TakeTail(typename Rows::Step step,
                                        typename Rows::Piece piece, int64_t i,
                                        int64_t count, F v) {
  float buffers[Rows::kVectors][kWidth] = {};
  typename Rows::Piece tail;
  for (int vector = 0; vector < Rows::kVectors; ++vector) {
    tail.p[vector] = buffers[vector];
    memcpy(buffers[vector], piece.p[vector] + i, count * sizeof(float));
  }
  step.template Take<false>(tail, 0, v);
  for (int vector = 0; vector < Rows::kWritten; ++vector) {
    memcpy(piece.p[vector] + i, buffers[vector], count * sizeof(float));
  }
}

// Takes `count` elements of some rows of the product. Their factors on the left follow
// each other.
template <typename Rows, int Number, bool kStreams>
inline void TakeRows(const float* left, int64_t rank, const float* columns,
                     int64_t stride, int64_t count, const typename Rows::Step& given,
                     const typename Rows::Piece* given_pieces) {
  // Copies, since stores of vectors might change what is in memory.
  const typename Rows::Step step = given;
  typename Rows::Piece pieces[Number];
  for (int r = 0; r < Number; ++r) pieces[r] = given_pieces[r];
  const auto take = [&](int r, int64_t at, F v) __attribute__((always_inline)) {
    step.template Take<kStreams>(pieces[r], at, v);
  };
  const auto take_tail = [&](int r, int64_t at, F v) __attribute__((always_inline)) {
    TakeTail<Rows>(step, pieces[r], at, count - at, v);
  };
  const auto multiply = [&](auto vectors, int64_t i,
                            const auto& taken) __attribute__((always_inline)) {
    constexpr int kVectors = vectors.kValue;
    F sums[Number][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < Number; ++r) {
#pragma GCC unroll 4
      for (int vector = 0; vector < Rows::kVectors; ++vector) {
        __builtin_prefetch(pieces[r].p[vector] + i + kTakenAhead);
      }
    }
    const auto each = [&](int64_t k, const auto& add) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F column = Load(columns + k * stride + i + v * kWidth);
#pragma GCC unroll 4
        for (int r = 0; r < Number; ++r) {
          add(sums[r][v], Mul(Set(left[r * rank + k]), column));
        }
      }
    };
    each(0, [](F& sum, F product) { sum = product; });
    for (int64_t k = 1; k < rank; ++k) {
      each(k, [](F& sum, F product) { sum = Add(sum, product); });
    }
#pragma GCC unroll 4
    for (int r = 0; r < Number; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        taken(r, i + v * kWidth, sums[r][v]);
      }
    }
  };
  int64_t i = 0;
  for (; i + 2 * kWidth <= count; i += 2 * kWidth) multiply(Constant<2>(), i, take);
  for (; i + kWidth <= count; i += kWidth) multiply(Constant<1>(), i, take);
  if (i < count) multiply(Constant<1>(), i, take_tail);
}

// Gives the product to `Rows`, in pieces.
template <typename Rows, typename Args>
void GiveProduct(const Parallel& parallel, const Args& args) {
  using Piece = typename Rows::Piece;
  const Units units(
      args, [](const MatrixTensor& t) { return t.rows; },
      [](const MatrixTensor& t) {
        return RoundUp(CeilDiv(kUnitElements, t.columns == 0 ? 1 : t.columns),
                       kRowsTaken);
      });
  units.Each(parallel, [&](const MatrixTensor& tensor, int64_t begin, int64_t end) {
    const float* const right = args.right + tensor.value;
    Rows rows(args);
    if (tensor.columns == 0) {
      for (int64_t at = begin; at < end; at += kSpan) {
        const int64_t count = Smaller(kSpan, end - at), first = tensor.element + at;
        const Piece piece = rows.At(0, first, count);
        int64_t i = 0;
        for (; i + kWidth <= count; i += kWidth) {
          rows.step.template Take<false>(piece, i, Load(right + at + i));
        }
        if (i < count) {
          float tail[kWidth] = {};
          memcpy(tail, right + at + i, (count - i) * sizeof(float));
          TakeTail<Rows>(rows.step, piece, i, count - i, Load(tail));
        }
        rows.Took(0, piece, first, count);
      }
      return;
    }
    const Columns columns(right, tensor.columns, args.rank);
    for (int64_t row = begin; row < end; row += kRowsTaken) {
      const int64_t number = Smaller(kRowsTaken, end - row);
      const float* const left = args.left + tensor.left + row * args.rank;
      for (int64_t column = 0; column < tensor.columns; column += kSpan) {
        const int64_t count = Smaller(kSpan, tensor.columns - column);
        const int64_t first = tensor.element + row * tensor.columns + column;
        Piece pieces[kRowsTaken];
        bool streams = rows.streams;
        for (int r = 0; r < number; ++r) {
          pieces[r] = rows.At(r, first + r * tensor.columns, count);
          streams &= CanStream(pieces[r].p[0]);
        }
        const float* const of_column = columns.Of(0) + column;
        const auto take = [&](auto several, auto past, int r) {
          TakeRows<Rows, several.kValue, past.kValue>(left + r * args.rank, args.rank,
                                                      of_column, columns.stride, count,
                                                      rows.step, pieces + r);
        };
        const auto take_all = [&](auto past) {
          if (number == kRowsTaken) return take(Constant<kRowsTaken>(), past, 0);
          for (int r = 0; r < number; ++r) take(Constant<1>(), past, r);
        };
        if constexpr (Rows::kCanStream) {
          streams ? take_all(Constant<true>()) : take_all(Constant<false>());
        } else {
          take_all(Constant<false>());
        }
        for (int r = 0; r < number; ++r) {
          rows.Took(r, pieces[r], first + r * tensor.columns, count);
        }
      }
    }
    if (rows.streams) Fence();
  });
}

void Kernel(const Parallel& parallel, const MultiplyFactors& args) {
  if (args.update == nullptr) return GiveProduct<WrittenRows>(parallel, args);
  WithRule(args.update->rule,
           [&](auto rule) { GiveProduct<AppliedRows<rule.kValue>>(parallel, args); });
}

void Kernel(const Parallel& parallel, const SubtractFactors& args) {
  GiveProduct<SubtractedRows>(parallel, args);
}

// -- Orthonormal columns ----------------------------------------------------------

// The sum of products of two vectors, whose size is a multiple of kLanesOfSum.
inline double Dot(const double* a, const double* b, int64_t size) {
  static_assert(kLanesOfSum == 2 * kLanes, "");
  D low = SetDoubles(0), high = SetDoubles(0);
  for (int64_t begin = 0; begin < size; begin += kRowChunk) {
    D low_sum = SetDoubles(0), high_sum = SetDoubles(0);
    const int64_t end = Smaller(size, begin + kRowChunk);
    for (int64_t i = begin; i < end; i += kLanesOfSum) {
      low_sum = Add(low_sum, Mul(LoadDoubles(a + i), LoadDoubles(b + i)));
      high_sum =
          Add(high_sum, Mul(LoadDoubles(a + i + kLanes), LoadDoubles(b + i + kLanes)));
    }
    low = Add(low, low_sum);
    high = Add(high, high_sum);
  }
  return SumLanes(Add(low, high));
}

// Makes the columns of a factor orthonormal. Each has `stride` elements, the last of
// which are zeros.
inline void OrthonormalizeColumns(double* columns, int64_t stride, int64_t rank) {
  for (int64_t k = 0; k < rank; ++k) {
    double* const column = columns + k * stride;
    const double before = __builtin_sqrt(Dot(column, column, stride));
    for (int64_t other = 0; other < k; ++other) {
      const double* const basis = columns + other * stride;
      const D factor = SetDoubles(Dot(basis, column, stride));
      for (int64_t i = 0; i < stride; i += kLanes) {
        const D part = Mul(factor, LoadDoubles(basis + i));
        StoreDoubles(column + i, Sub(LoadDoubles(column + i), part));
      }
    }
    const double length = __builtin_sqrt(Dot(column, column, stride));
    if (length <= 1e-10 * before) {
      memset(column, 0, stride * sizeof(double));
    } else {
      for (int64_t i = 0; i < stride; ++i) column[i] /= length;
    }
  }
}

void Kernel(const Parallel& parallel, const Orthonormalize& args) {
  const int64_t rank = args.rank, factors = args.num_factors;
  const Zeros<int64_t> begins(factors + 1);
  for (int64_t i = 0; i < factors; ++i) {
    begins[i + 1] = begins[i] + args.rows[i] * rank;
  }
  const int64_t bytes = factors == 0 ? 0 : CeilDiv(8 * args.size * rank, factors);
  For(parallel, factors, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t factor = begin; factor < end; ++factor) {
      const float* const x = args.x + begins[factor];
      float* const basis = args.basis + begins[factor];
      const int64_t rows = args.rows[factor], stride = RoundUp(rows, kLanesOfSum);
      double* const columns =
          args.scratch + begins[factor] + factor * (kLanesOfSum - 1) * rank;
      for (int64_t k = 0; k < rank; ++k) {
        for (int64_t i = 0; i < stride; ++i) {
          columns[k * stride + i] = i < rows ? x[i * rank + k] : 0;
        }
      }
      OrthonormalizeColumns(columns, stride, rank);
      for (int64_t k = 0; k < rank; ++k) {
        for (int64_t i = 0; i < rows; ++i) {
          basis[i * rank + k] = static_cast<float>(columns[k * stride + i]);
        }
      }
    }
  });
}
