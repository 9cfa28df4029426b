// Products of matrices with factors of few columns.

// -- M Q --------------------------------------------------------------------------

// Sums by lanes have so many vectors.
constexpr int kPartsOfSum = kLanesOfSum / kWidth;
// Columns of the factor that are taken together, so that all sums have a register.
constexpr int kColumnsMultiplied = kWidth == 4 ? 2 : 4;
// The elements of a row that its lanes add at a time.
constexpr int64_t kRowChunk = kLanesOfSum * kLaneSteps;
using RowPieces = Pieces<const float, 1, kRowChunk>;

// The sums of a row's products with `Rank` columns of the factor, by lanes.
template <int Rank>
using LaneSums = F[Rank][kPartsOfSum];

// Adds up the products of `count` elements of a row. The first ones of the row set the
// sums, others are added to them.
template <int Rank>
inline __attribute__((always_inline)) void AddChunk(
    const float* row, const float* columns, int64_t stride, int64_t count, F scale,
    bool is_first, int64_t ahead, LaneSums<Rank>& totals) {
  LaneSums<Rank> sums;
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
      // A sum that begins with 0 is never -0, so that 0 need not be added.
      totals[k][part] = is_first ? sums[k][part] : Add(totals[k][part], sums[k][part]);
    }
  }
}

// The first steps of adding lanes, until they are a vector.
inline F Fold(const F (&lanes)[kPartsOfSum]) {
  if constexpr (kPartsOfSum == 1) {
    return lanes[0];
  } else if constexpr (kPartsOfSum == 2) {
    return Add(lanes[0], lanes[1]);
  } else {
    return Add(Add(lanes[0], lanes[2]), Add(lanes[1], lanes[3]));
  }
}

// Rows that are taken together, so that a chunk of the factor stays in the cache, and
// the lanes of many sums are added at once.
constexpr int kRowsTogether = 16;

// The products of up to kRowsTogether rows and `Rank` columns of the factor.
template <int Rank>
void MultiplyRows(const MatrixTensor& tensor, int64_t first, int64_t last, F scale,
                  const float* columns, int64_t stride, RowPieces& pieces,
                  float (&products)[kRowsTogether * Rank]) {
  LaneSums<Rank> totals[kRowsTogether];
  const int64_t ahead = Ahead(2 * tensor.columns);
  for (int64_t column = 0; column < tensor.columns; column += kRowChunk) {
    const int64_t count = Smaller(kRowChunk, tensor.columns - column);
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = tensor.element + row * tensor.columns + column;
      AddChunk<Rank>(pieces.ToRead(0, begin, count), columns + column, stride, count,
                     scale, column == 0, ahead, totals[row - first]);
    }
  }
  F lanes[kRowsTogether * Rank];
  for (int64_t i = 0; i < kRowsTogether * Rank; ++i) {
    lanes[i] = i / Rank < last - first ? Fold(totals[i / Rank][i % Rank]) : Set(0);
  }
  for (int i = 0; i < kRowsTogether * Rank; i += kWidth) {
    SumLanes(products + i, lanes + i);
  }
}

void Kernel(const Parallel& parallel, const MultiplyMatrices& args) {
  const Units units(
      args, [](const MatrixTensor& t) { return t.columns == 0 ? 0 : t.rows; },
      [](const MatrixTensor& t) {
        return RoundUp(CeilDiv(kUnitElements, t.columns + 1), kRowsTogether);
      });
  units.Each(parallel, [&](const MatrixTensor& tensor, int64_t begin, int64_t end) {
    const Columns columns(args.right + tensor.right, tensor.columns, args.rank);
    const F scale = Set(args.x.scale);
    RowPieces pieces(args.x, args.size);
    for (int64_t first = begin; first < end; first += kRowsTogether) {
      const int64_t last = Smaller(end, first + kRowsTogether);
      EachRankTile<kColumnsMultiplied>(args.rank, [&](auto tile, int64_t k) {
        constexpr int kTile = decltype(tile)::kValue;
        float products[kRowsTogether * kTile];
        MultiplyRows<kTile>(tensor, first, last, scale, columns.Of(k), columns.stride,
                            pieces, products);
        float* to = args.products + tensor.left + first * args.rank + k;
        for (int64_t row = 0; row < last - first; ++row, to += args.rank) {
          for (int i = 0; i < kTile; ++i) to[i] = products[row * kTile + i];
        }
      });
    }
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
