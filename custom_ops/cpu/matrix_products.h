// Products of matrices with factors of few columns.

// -- M Q --------------------------------------------------------------------------

// Sums by lanes have so many vectors.
constexpr int kPartsOfSum = kLanesOfSum / kWidth;
// Columns of the factor that are taken together, so that all sums have a register.
constexpr int kColumnsMultiplied = kWidth == 4 ? 2 : 4;
// The elements of a row that its lanes add at a time.
constexpr int64_t kRowChunk = kLanesOfSum * kLaneSteps;
using RowPieces = Pieces<const float, 1, kRowChunk>;

// Adds up the products of `count` elements of a row and `Rank` columns of the factor.
// The first ones of the row set the totals, [Rank, kLanesOfSum]; others are added.
template <int Rank>
inline __attribute__((always_inline)) void AddChunk(const float* row,
                                                    const float* columns,
                                                    int64_t stride, int64_t count,
                                                    F scale, bool is_first,
                                                    int64_t ahead, float* totals) {
  F sums[Rank][kPartsOfSum];
#pragma GCC unroll 8
  for (int k = 0; k < Rank; ++k) {
#pragma GCC unroll 4
    for (int part = 0; part < kPartsOfSum; ++part) sums[k][part] = Set(0);
  }
  const auto add = [&](const float* x, int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int part = 0; part < kPartsOfSum; ++part) {
      if (part == 0) __builtin_prefetch(x + ahead);
      const F factor = Mul(scale, Load(x + part * kWidth));
#pragma GCC unroll 8
      for (int k = 0; k < Rank; ++k) {
        const F column = Load(columns + k * stride + i + part * kWidth);
        sums[k][part] = Add(sums[k][part], Mul(factor, column));
      }
    }
  };
  int64_t i = 0;
  for (; i + kLanesOfSum <= count; i += kLanesOfSum) add(row + i, i);
  if (i < count) {
    alignas(kCacheLine) float tail[kLanesOfSum] = {};
    memcpy(tail, row + i, (count - i) * sizeof(float));
    add(tail, i);
  }
#pragma GCC unroll 8
  for (int k = 0; k < Rank; ++k) {
#pragma GCC unroll 4
    for (int part = 0; part < kPartsOfSum; ++part) {
      float* const total = totals + k * kLanesOfSum + part * kWidth;
      // A sum that begins with 0 is never -0, so that 0 need not be added.
      Store(total, is_first ? sums[k][part] : Add(Load(total), sums[k][part]));
    }
  }
}

// The first steps of adding lanes, until they are a vector.
inline F Fold(const float* lanes) {
  F sum[kPartsOfSum];
  for (int part = 0; part < kPartsOfSum; ++part)
    sum[part] = Load(lanes + part * kWidth);
  if constexpr (kPartsOfSum == 1) {
    return sum[0];
  } else if constexpr (kPartsOfSum == 2) {
    return Add(sum[0], sum[1]);
  } else {
    return Add(Add(sum[0], sum[2]), Add(sum[1], sum[3]));
  }
}

// Rows that are taken together, so that a chunk of the factor stays in the cache, and
// the lanes of many sums are added at once.
constexpr int kRowsTogether = 16;

// Multiplies the rows [begin, end) of a matrix by its factor among those of `query`.
// read(row, column, count) returns elements of a row; what is `ahead` of them is read
// next.
template <typename Args, typename Read>
void MultiplyRows(const Args& args, const float* query, const MatrixTensor& tensor,
                  int64_t begin, int64_t end, F scale, int64_t ahead,
                  const Read& read) {
  const int64_t rank = args.rank;
  const Columns columns(query + tensor.right, tensor.columns, rank);
  const Zeros<float> totals(kRowsTogether * rank * kLanesOfSum);
  for (int64_t first = begin; first < end; first += kRowsTogether) {
    const int64_t last = Smaller(end, first + kRowsTogether);
    for (int64_t column = 0; column < tensor.columns; column += kRowChunk) {
      const int64_t count = Smaller(kRowChunk, tensor.columns - column);
      for (int64_t row = first; row < last; ++row) {
        const float* const x = read(row, column, count);
        float* const of_row = totals + (row - first) * rank * kLanesOfSum;
        EachRankTile<kColumnsMultiplied>(rank, [&](auto tile, int64_t k) {
          AddChunk<decltype(tile)::kValue>(x, columns.Of(k) + column, columns.stride,
                                           count, scale, column == 0, ahead,
                                           of_row + k * kLanesOfSum);
        });
      }
    }
    float* const products = args.products + tensor.left + first * rank;
    const int64_t number = (last - first) * rank;
    for (int64_t i = 0; i < number; i += kWidth) {
      F lanes[kWidth];
      for (int j = 0; j < kWidth; ++j) lanes[j] = Fold(totals + (i + j) * kLanesOfSum);
      float sums[kWidth];
      SumLanes(sums, lanes);
      memcpy(products + i, sums, Smaller(kWidth, number - i) * sizeof(float));
    }
  }
}

inline int64_t RowsOfUnit(const MatrixTensor& tensor) {
  return RoundUp(CeilDiv(kUnitElements, tensor.columns + 1), kRowsTogether);
}

void Kernel(const Parallel& parallel, const MultiplyMatrices& args) {
  const Units units(
      args, [](const MatrixTensor& t) { return t.columns == 0 ? 0 : t.rows; },
      RowsOfUnit);
  units.Each(parallel, [&](const MatrixTensor& tensor, int64_t begin, int64_t end) {
    RowPieces pieces(args.x, args.size);
    MultiplyRows(args, args.right, tensor, begin, end, Set(args.x.scale),
                 Ahead(2 * tensor.columns),
                 [&](int64_t row, int64_t column, int64_t count) {
                   const int64_t at = row * tensor.columns + column;
                   return pieces.ToRead(0, tensor.element + at, count);
                 });
  });
}

// -- (X + f (Y - P R^T)) Q --------------------------------------------------------

constexpr int kVectorsSummed = 4;  // At a time.

// Chunks of x + f (y - P R^T), which are written, and stay in the cache for their
// products.
class SummedPieces {
 public:
  SummedPieces(const MultiplySum& args, const MatrixTensor& tensor)
      : x_(args.x, args.size),
        args_(args),
        tensor_(tensor),
        right_(args.right + tensor.value, tensor.columns, args.rank),
        ahead_(Ahead(2 * tensor.columns)),
        is_large_(IsStreamed(args.size)) {}
  ~SummedPieces() {
    if (is_large_) Fence();
  }

  // Returns elements of a row of a matrix.
  const float* Row(int64_t row, int64_t column, int64_t count) {
    const float* const left = args_.left + tensor_.left + row * args_.rank;
    const float* const right = right_.Of(0) + column;
    const int64_t rank = args_.rank, stride = right_.stride;
    const auto multiply = [=](auto vectors, int64_t i,
                              F* product) __attribute__((always_inline)) {
      const auto each = [&](int64_t k, const auto& add) __attribute__((always_inline)) {
        const F factor = Set(left[k]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors.kValue; ++v) {
          add(product[v], Mul(factor, Load(right + k * stride + i + v * kWidth)));
        }
      };
      each(0, [](F& sum, F first) { sum = first; });
      for (int64_t k = 1; k < rank; ++k) {
        each(k, [](F& sum, F next) { sum = Add(sum, next); });
      }
    };
    return Sum(row * tensor_.columns + column, count, multiply);
  }

  // Takes elements of a tensor that is no matrix.
  void Others(int64_t at, int64_t count) {
    const float* const others = args_.right + tensor_.value + at;
    Sum(at, count, [=](auto vectors, int64_t i, F* product) {
      if (i + kWidth <= count) {
        for (int v = 0; v < vectors.kValue; ++v)
          product[v] = Load(others + i + v * kWidth);
        return;
      }
      float tail[kWidth] = {};
      memcpy(tail, others + i, (count - i) * sizeof(float));
      product[0] = Load(tail);
    });
  }

 private:
  // Sums elements of the tensor. product_of(vectors, i, product) sets some vectors of
  // P R^T, from element i on.
  template <typename ProductOf>
  inline __attribute__((always_inline)) const float* Sum(int64_t at, int64_t count,
                                                         const ProductOf& product_of) {
    const int64_t begin = tensor_.element + at;
    const float* const x = x_.ToRead(0, begin, count);
    float* const to = args_.total + begin;
    if (is_large_ && CanStream(to)) {
      Sum(x, args_.y + begin, count, to, product_of, Stream);
    } else {
      Sum(x, args_.y + begin, count, to, product_of, Store);
    }
    return sum_;
  }

  template <typename ProductOf, typename Write>
  inline __attribute__((always_inline)) void Sum(const float* x, const float* y,
                                                 int64_t count, float* to,
                                                 const ProductOf& product_of,
                                                 const Write& write) {
    const F scale = Set(args_.x.scale), factor = Set(*args_.factor);
    const int64_t ahead = ahead_;
    const auto add = [&](const float* a, const float* b, F product)
                         __attribute__((always_inline)) {
                           const F left = Sub(Load(b), product);
                           return Add(Mul(scale, Load(a)), Mul(factor, left));
                         };
    const auto add_vectors = [&](auto vectors, int64_t i)
                                 __attribute__((always_inline)) {
                                   F product[vectors.kValue];
                                   product_of(vectors, i, product);
#pragma GCC unroll 4
                                   for (int v = 0; v < vectors.kValue; ++v) {
                                     const int64_t at = i + v * kWidth;
                                     __builtin_prefetch(x + at + ahead);
                                     __builtin_prefetch(y + at + ahead);
                                     const F sum = add(x + at, y + at, product[v]);
                                     Store(sum_ + at, sum);
                                     write(to + at, sum);
                                   }
                                 };
    constexpr int64_t kMost = kVectorsSummed * kWidth;
    int64_t i = 0;
    for (; i + kMost <= count; i += kMost) add_vectors(Constant<kVectorsSummed>(), i);
    for (; i + kWidth <= count; i += kWidth) add_vectors(Constant<1>(), i);
    if (i == count) return;
    float a[kWidth] = {}, b[kWidth] = {};
    memcpy(a, x + i, (count - i) * sizeof(float));
    memcpy(b, y + i, (count - i) * sizeof(float));
    F product;
    product_of(Constant<1>(), i, &product);
    Store(sum_ + i, add(a, b, product));
    memcpy(to + i, sum_ + i, (count - i) * sizeof(float));
  }

  RowPieces x_;
  const MultiplySum args_;
  const MatrixTensor tensor_;
  const Columns right_;
  const int64_t ahead_;
  const bool is_large_;
  alignas(kCacheLine) float sum_[kRowChunk];
};

void Kernel(const Parallel& parallel, const MultiplySum& args) {
  const Units units(args, [](const MatrixTensor& t) { return t.rows; }, RowsOfUnit);
  units.Each(parallel, [&](const MatrixTensor& tensor, int64_t begin, int64_t end) {
    SummedPieces pieces(args, tensor);
    if (tensor.columns == 0) {
      for (int64_t at = begin; at < end; at += kRowChunk) {
        pieces.Others(at, Smaller(kRowChunk, end - at));
      }
      return;
    }
    MultiplyRows(args, args.query, tensor, begin, end, Set(1), 0,
                 [&](int64_t row, int64_t column, int64_t count) {
                   return pieces.Row(row, column, count);
                 });
  });
}

// -- M^T P ------------------------------------------------------------------------

constexpr int kRowsAdded = 4;     // At a time; divides kLaneSteps.
constexpr int kColumnsAdded = 4;  // Of the factor.

// Copies the last elements of rows, less than a vector, and fills them up with zeros.
template <int Rows, int Count>
inline void CopyTails(const float* const (&rows)[Rows], int64_t begin, int64_t end,
                      float (&tails)[Rows][Count]) {
  memset(tails, 0, sizeof(tails));
  for (int r = 0; r < Rows; ++r) {
    memcpy(tails[r], rows[r] + begin, (end - begin) * sizeof(float));
  }
}

// Adds products of `count` columns of the matrix, in kRowsAdded rows, and of `Rank`
// columns of the factor.
template <int Rank>
inline __attribute__((always_inline)) void AddRows(
    const float* const (&rows)[kRowsAdded], const float* const (&left)[kRowsAdded],
    int64_t count, F scale, float* sums, int64_t stride, int64_t ahead) {
  F factor[kRowsAdded][Rank];
#pragma GCC unroll 4
  for (int r = 0; r < kRowsAdded; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < Rank; ++k) factor[r][k] = Set(left[r][k]);
  }
  const auto add = [&](const float* const(&from)[kRowsAdded], int64_t at, int64_t i)
                       __attribute__((always_inline)) {
                         F x[kRowsAdded];
#pragma GCC unroll 4
                         for (int r = 0; r < kRowsAdded; ++r) {
                           __builtin_prefetch(from[r] + at + ahead);
                           x[r] = Mul(scale, Load(from[r] + at));
                         }
#pragma GCC unroll 4
                         for (int k = 0; k < Rank; ++k) {
                           F sum = Load(sums + k * stride + i);
#pragma GCC unroll 4
                           for (int r = 0; r < kRowsAdded; ++r)
                             sum = Add(sum, Mul(x[r], factor[r][k]));
                           Store(sums + k * stride + i, sum);
                         }
                       };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) add(rows, i, i);
  if (i < count) {
    alignas(kCacheLine) float tails[kRowsAdded][kWidth];
    CopyTails(rows, i, count, tails);
    const float* from[kRowsAdded];
    for (int r = 0; r < kRowsAdded; ++r) from[r] = tails[r];
    add(from, 0, i);
  }
}

void Kernel(const Parallel& parallel, const MultiplyTransposed& args) {
  const Units units(
      args, [](const MatrixTensor& t) { return t.columns == 0 ? t.rows : t.columns; },
      [](const MatrixTensor& t) {
        return t.columns == 0 ? kUnitElements
                              : RoundUp(CeilDiv(kUnitElements, t.rows), kLanesOfSum);
      });
  units.Each(parallel, [&](const MatrixTensor& tensor, int64_t begin, int64_t end) {
    const int64_t rank = args.rank;
    float* const to = args.factors + tensor.value;
    if (tensor.columns == 0) {
      CutReader<kGroup> reader(args.x, args.size);
      reader.Copy(tensor.element + begin, tensor.element + end, to + begin);
      return;
    }
    const F scale = Set(args.x.scale);
    const int64_t ahead = Ahead(kRowsAdded * tensor.columns);
    Pieces<const float, kRowsAdded, kSpan> pieces(args.x, args.size);
    // `rank` rows of kSpan sums each.
    const Zeros<float> totals(rank * kSpan), sums(rank * kSpan);
    const Zeros<float> no_row(kSpan), no_factor(rank);
    for (int64_t column = begin; column < end; column += kSpan) {
      const int64_t count = Smaller(kSpan, end - column);
      const int64_t stride = RoundUp(count, kWidth);
      memset(totals, 0, rank * stride * sizeof(float));
      for (int64_t chunk = 0; chunk < tensor.rows; chunk += kLaneSteps) {
        memset(sums, 0, rank * stride * sizeof(float));
        const int64_t last = Smaller(tensor.rows, chunk + kLaneSteps);
        for (int64_t row = chunk; row < last; row += kRowsAdded) {
          const float *rows[kRowsAdded], *left[kRowsAdded];
          for (int r = 0; r < kRowsAdded; ++r) {
            const bool exists = row + r < last;
            const int64_t at = (row + r) * tensor.columns + column;
            rows[r] = exists ? pieces.ToRead(r, tensor.element + at, count) : no_row;
            left[r] = exists ? args.left + tensor.left + (row + r) * rank : no_factor;
          }
          EachRankTile<kColumnsAdded>(rank, [&](auto tile, int64_t k) {
            const float* factor[kRowsAdded];
            for (int r = 0; r < kRowsAdded; ++r) factor[r] = left[r] + k;
            AddRows<decltype(tile)::kValue>(rows, factor, count, scale,
                                            sums + k * stride, stride, ahead);
          });
        }
        for (int64_t i = 0; i < rank * stride; i += kWidth) {
          Store(totals + i, Add(Load(totals + i), Load(sums + i)));
        }
      }
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t k = 0; k < rank; ++k) {
          to[(column + i) * rank + k] = totals[k * stride + i];
        }
      }
    }
  });
}
