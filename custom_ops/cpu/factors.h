// Products of two factors, and orthonormal factors.

// -- P Q^T ------------------------------------------------------------------------

constexpr int kRowsWritten = 4;  // At a time.

// Writes `count` elements of some rows of the product. Their factors on the left follow
// each other.
template <int Rows>
inline void WriteRows(const float* left, int64_t rank, const float* columns,
                      int64_t stride, int64_t count, bool streams, float* const* rows) {
  // Calls write(row, vector, v) for some vectors at element i of each row.
  const auto multiply = [&](auto vectors, int64_t i,
                            const auto& write) __attribute__((always_inline)) {
    constexpr int kVectors = decltype(vectors)::kValue;
    F sums[Rows][kVectors];
    const auto each = [&](int64_t k, const auto& add) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F column = Load(columns + k * stride + i + v * kWidth);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          add(sums[r][v], Mul(Set(left[r * rank + k]), column));
        }
      }
    };
    each(0, [](F& sum, F product) { sum = product; });
    for (int64_t k = 1; k < rank; ++k) {
      each(k, [](F& sum, F product) { sum = Add(sum, product); });
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVectors; ++v) write(rows[r] + i + v * kWidth, sums[r][v]);
    }
  };
  const auto all = [&](const auto& write) {
    int64_t i = 0;
    for (; i + 2 * kWidth <= count; i += 2 * kWidth) {
      multiply(Constant<2>(), i, write);
    }
    for (; i + kWidth <= count; i += kWidth) {
      multiply(Constant<1>(), i, write);
    }
    if (i == count) return;
    multiply(Constant<1>(), i, [&](float* to, F vector) {
      float buffer[kWidth];
      Store(buffer, vector);
      memcpy(to, buffer, (count - i) * sizeof(float));
    });
  };
  if (streams) {
    all([](float* to, F vector) { Stream(to, vector); });
  } else {
    all([](float* to, F vector) { Store(to, vector); });
  }
}

// Rows of the product that are written where they belong. This and the next two classes
// say where a piece of row `i` is to be written, and take it once it is.
class WrittenRows {
 public:
  explicit WrittenRows(const MultiplyFactors& args)
      : streams(IsStreamed(args.size)), pieces_(args.values, args.size) {}
  ~WrittenRows() {
    if (streams) Fence();
  }

  float* At(int i, int64_t begin, int64_t count) {
    return pieces_.ToWrite(i, begin, count);
  }
  void Take(int i, const float* piece, int64_t begin, int64_t count) {
    pieces_.Wrote(i, piece, begin, count);
  }

  const bool streams;  // Whether pieces are written past the caches.

 private:
  Pieces<float, kRowsWritten, kSpan> pieces_;
};

// Rows that an update takes.
class AppliedRows {
 public:
  explicit AppliedRows(const MultiplyFactors& args)
      : values_(args.values, args.update, args.size) {}

  float* At(int i, int64_t, int64_t) { return buffers_[i]; }
  void Take(int, const float* piece, int64_t begin, int64_t count) {
    for (int64_t at = 0; at < count; at += kGroup) {
      F group[kParts];
      LoadGroup(piece + at, group);
      const int64_t last = Smaller(count, at + kGroup);
      values_.StepAnywhere(begin + at, begin + last, group);
    }
  }

  static constexpr bool streams = false;

 private:
  ValueWriter values_;
  alignas(kCacheLine) float buffers_[kRowsWritten][kSpan] = {};
};

// Rows that are subtracted from x.
class SubtractedRows {
 public:
  explicit SubtractedRows(const SubtractFactors& args)
      : args_(args), is_streamed_(IsStreamed(args.size) && args.difference != args.x) {}
  ~SubtractedRows() {
    if (is_streamed_) Fence();
  }

  float* At(int i, int64_t, int64_t) { return buffers_[i]; }
  void Take(int, const float* piece, int64_t begin, int64_t count) {
    const float* const x = args_.x + begin;
    float* const to = args_.difference + begin;
    const bool is_aligned = reinterpret_cast<uintptr_t>(to) % kStreamAlignment == 0;
    if (is_streamed_ && is_aligned) {
      Subtract(x, piece, count, to, Stream);
    } else {
      Subtract(x, piece, count, to, Store);
    }
  }

  static constexpr bool streams = false;

 private:
  template <typename Write>
  static inline __attribute__((always_inline)) void Subtract(const float* x,
                                                             const float* piece,
                                                             int64_t count, float* to,
                                                             const Write& write) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
      __builtin_prefetch(x + i + kAhead);
      write(to + i, Sub(Load(x + i), Load(piece + i)));
    }
    for (; i < count; ++i) to[i] = x[i] - piece[i];
  }

  const SubtractFactors args_;
  const bool is_streamed_;
  alignas(kCacheLine) float buffers_[kRowsWritten][kSpan] = {};
};

// Gives the product to `Rows`, in pieces.
template <typename Rows, typename Args>
void GiveProduct(const Parallel& parallel, const Args& args) {
  const Units units(
      args, [](const MatrixTensor& t) { return t.rows; },
      [](const MatrixTensor& t) {
        return RoundUp(CeilDiv(kUnitElements, t.columns == 0 ? 1 : t.columns),
                       kRowsWritten);
      });
  units.Each(parallel, [&](const MatrixTensor& tensor, int64_t begin, int64_t end) {
    const float* const right = args.right + tensor.value;
    Rows pieces(args);
    if (tensor.columns == 0) {
      for (int64_t at = begin; at < end; at += kSpan) {
        const int64_t count = Smaller(kSpan, end - at), first = tensor.element + at;
        float* const piece = pieces.At(0, first, count);
        memcpy(piece, right + at, count * sizeof(float));
        pieces.Take(0, piece, first, count);
      }
      return;
    }
    const Columns columns(right, tensor.columns, args.rank);
    for (int64_t row = begin; row < end; row += kRowsWritten) {
      const int64_t number = Smaller(kRowsWritten, end - row);
      const float* const left = args.left + tensor.left + row * args.rank;
      for (int64_t column = 0; column < tensor.columns; column += kSpan) {
        const int64_t count = Smaller(kSpan, tensor.columns - column);
        const int64_t first = tensor.element + row * tensor.columns + column;
        float* rows[kRowsWritten];
        bool streams = pieces.streams;
        for (int r = 0; r < number; ++r) {
          rows[r] = pieces.At(r, first + r * tensor.columns, count);
          streams &= reinterpret_cast<uintptr_t>(rows[r]) % kStreamAlignment == 0;
        }
        const float* const of_column = columns.Of(0) + column;
        if (number == kRowsWritten) {
          WriteRows<kRowsWritten>(left, args.rank, of_column, columns.stride, count,
                                  streams, rows);
        } else {
          for (int r = 0; r < number; ++r) {
            WriteRows<1>(left + r * args.rank, args.rank, of_column, columns.stride,
                         count, streams, rows + r);
          }
        }
        for (int r = 0; r < number; ++r) {
          pieces.Take(r, rows[r], first + r * tensor.columns, count);
        }
      }
    }
  });
}

void Kernel(const Parallel& parallel, const MultiplyFactors& args) {
  if (args.update == nullptr) {
    GiveProduct<WrittenRows>(parallel, args);
  } else {
    GiveProduct<AppliedRows>(parallel, args);
  }
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
