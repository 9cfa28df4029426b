// Products of matrices with factors of few columns, and orthonormal columns.

// An array of this thread, aligned, of zeros.
template <typename T>
class Zeros {
 public:
  explicit Zeros(int64_t size) : data_(new (std::align_val_t{kCacheLine}) T[size]()) {}
  ~Zeros() { operator delete[](data_, std::align_val_t{kCacheLine}); }
  Zeros(const Zeros&) = delete;
  Zeros& operator=(const Zeros&) = delete;
  operator T*() const { return data_; }  // NOLINT: it is one.

 private:
  T* const data_;
};

// Elements that a unit of work has at least.
constexpr int64_t kUnitElements = int64_t{1} << 14;
// Columns that are taken together: rows of a factor's transpose stay in the cache.
constexpr int64_t kSpan = 512;
// Rows of a matrix that are read together, and columns of a factor, so that all sums
// have a register.
constexpr int kRowTile = kWidth == 16 ? 4 : 1;
constexpr int kRankTile = kWidth == 4 ? 2 : 4;
constexpr int kPartsOfSum = kLanesOfSum / kWidth;

constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

template <int Value>
struct Constant {
  static constexpr int kValue = Value;
};

// Calls body(tile, k) for tiles of the columns of factors: `tile` is a constant, and
// the tile has the columns k, k + 1, ... of that number.
template <typename Body>
inline __attribute__((always_inline)) void EachRankTile(int64_t rank,
                                                        const Body& body) {
  int64_t k = 0;
  for (; k + kRankTile <= rank; k += kRankTile) {
    body(Constant<kRankTile>(), k);
  }
  if (kRankTile > 2 && k + 2 <= rank) {
    body(Constant<2>(), k);
    k += 2;
  }
  if (k < rank) body(Constant<1>(), k);
}

// The tensors of a call, each cut into units of about as much work.
class Units {
 public:
  // length_of(tensor) is what is cut, its rows, its columns or its elements, and
  // unit_of(tensor) how many are a unit.
  template <typename Args, typename LengthOf, typename UnitOf>
  Units(const Args& args, const LengthOf& length_of, const UnitOf& unit_of)
      : size_(args.size),
        num_tensors_(args.num_tensors),
        tensors_(num_tensors_),
        splits_(num_tensors_ + 1) {
    EachTensor(args.rows, args.columns, num_tensors_, args.rank,
               [&](const MatrixTensor& tensor, int64_t i) {
                 tensors_[i] = {tensor, length_of(tensor), unit_of(tensor)};
                 splits_[i + 1] =
                     splits_[i] + CeilDiv(tensors_[i].length, tensors_[i].unit);
               });
  }

  // Calls body(tensor, first, last) for ranges that cover what is cut.
  template <typename Body>
  void Each(const Parallel& parallel, const Body& body) const {
    const int64_t units = splits_[num_tensors_];
    if (units == 0) return;
    For(parallel, units, CeilDiv(8 * size_, units), [&](int64_t begin, int64_t end) {
      for (int64_t i = BlockOf(begin, splits_, num_tensors_); begin < end; ++i) {
        const int64_t last = Smaller(end, splits_[i + 1]);
        if (last == begin) continue;
        const Tensor& t = tensors_[i];
        body(t.tensor, (begin - splits_[i]) * t.unit,
             Smaller(t.length, (last - splits_[i]) * t.unit));
        begin = last;
      }
    });
  }

 private:
  struct Tensor {
    MatrixTensor tensor;
    int64_t length, unit;
  };
  int64_t size_, num_tensors_;
  Zeros<Tensor> tensors_;
  Zeros<int64_t> splits_;
};

// The factor on the right of a matrix, column by column, each filled up with zeros.
class Columns {
 public:
  Columns(const float* factor, int64_t rows, int64_t rank)
      : stride(RoundUp(rows, kLanesOfSum)), data_(rank * stride) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < rank; ++k) data_[k * stride + i] = factor[i * rank + k];
    }
  }
  const float* Of(int64_t k) const { return data_ + k * stride; }

  const int64_t stride;

 private:
  Zeros<float> data_;
};

// Pieces of rows for reading or writing: in place, or, where no part of the vector
// holds all of a piece, in buffers.
template <typename T, int Count, int64_t Most>
class Pieces {
 public:
  Pieces(const CutVector<T>& vector, int64_t size) : part_(vector, size) {}

  T* ToRead(int i, int64_t begin, int64_t count) {
    if (Finds(begin, count)) return part_.At(begin);
    part_.EachPiece(begin, begin + count, [&](T* p, int64_t at, int64_t number) {
      memcpy(buffers_[i] + (at - begin), p, number * sizeof(T));
    });
    return buffers_[i];
  }

  T* ToWrite(int i, int64_t begin, int64_t count) {
    return Finds(begin, count) ? part_.At(begin) : buffers_[i];
  }
  // After the piece has been written.
  void Wrote(const float* piece, int64_t begin, int64_t count) {
    if (Finds(begin, count) && piece == part_.At(begin)) return;
    part_.EachPiece(begin, begin + count, [&](T* p, int64_t at, int64_t number) {
      memcpy(p, piece + (at - begin), number * sizeof(T));
    });
  }

 private:
  bool Finds(int64_t begin, int64_t count) {
    if (part_.Holds(begin, begin + count)) return true;
    part_.Seek(begin);
    return part_.Holds(begin, begin + count);
  }

  PartOfVector<T> part_;
  alignas(kCacheLine) float buffers_[Count][Most];
};

// Copies the last elements of rows, less than a vector, and fills them up with zeros.
template <int Rows, int Count>
inline void CopyTails(const float* const (&rows)[Rows], int64_t begin, int64_t end,
                      float (&tails)[Rows][Count]) {
  memset(tails, 0, sizeof(tails));
  for (int r = 0; r < Rows; ++r) {
    memcpy(tails[r], rows[r] + begin, (end - begin) * sizeof(float));
  }
}

// -- M Q --------------------------------------------------------------------------

// The elements of a row that its lanes add at a time.
constexpr int64_t kRowChunk = kLanesOfSum * kLaneSteps;
using RowPieces = Pieces<const float, kRowTile, kRowChunk>;

// Adds the products of `count` elements of some rows and of `Rank` columns to the sums
// of lanes.
template <int Rank>
inline __attribute__((always_inline)) void AddChunk(
    const float* const (&rows)[kRowTile], const float* columns, int64_t stride,
    int64_t count, F scale, F (&totals)[kRowTile][Rank][kPartsOfSum]) {
  F sums[kRowTile][Rank][kPartsOfSum] = {};
  const auto add = [&](const float* const(&from)[kRowTile], int64_t at,
                       int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int part = 0; part < kPartsOfSum; ++part) {
      F column[Rank];
#pragma GCC unroll 4
      for (int k = 0; k < Rank; ++k) {
        column[k] = Load(columns + k * stride + i + part * kWidth);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRowTile; ++r) {
        const F x = Mul(scale, Load(from[r] + at + part * kWidth));
#pragma GCC unroll 4
        for (int k = 0; k < Rank; ++k) {
          sums[r][k][part] = Add(sums[r][k][part], Mul(x, column[k]));
        }
      }
    }
  };
  int64_t i = 0;
  for (; i + kLanesOfSum <= count; i += kLanesOfSum) add(rows, i, i);
  if (i < count) {
    alignas(kCacheLine) float tails[kRowTile][kLanesOfSum];
    CopyTails(rows, i, count, tails);
    const float* from[kRowTile];
    for (int r = 0; r < kRowTile; ++r) from[r] = tails[r];
    add(from, 0, i);
  }
  for (int r = 0; r < kRowTile; ++r) {
    for (int k = 0; k < Rank; ++k) {
      for (int part = 0; part < kPartsOfSum; ++part) {
        totals[r][k][part] = Add(totals[r][k][part], sums[r][k][part]);
      }
    }
  }
}

// The first steps of adding lanes, until they are a vector.
inline F Fold(const F (&lanes)[kPartsOfSum]) {
  F sum[kPartsOfSum];
  memcpy(&sum, &lanes, sizeof(sum));
  for (int half = kPartsOfSum / 2; half > 0; half /= 2) {
    for (int part = 0; part < half; ++part)
      sum[part] = Add(sum[part], sum[part + half]);
  }
  return sum[0];
}

// Rows that are taken together, so that lanes of many sums are added at once.
constexpr int kRowsTogether = 16;

// The products of up to kRowsTogether rows and `Rank` columns.
template <int Rank>
void MultiplyRows(const MatrixTensor& tensor, int64_t first, int64_t last, F scale,
                  const float* columns, int64_t stride, RowPieces& pieces,
                  float (&products)[kRowsTogether * Rank]) {
  F lanes[kRowsTogether * Rank] = {};
  for (int64_t row = first; row < last; row += kRowTile) {
    F totals[kRowTile][Rank][kPartsOfSum] = {};
    for (int64_t column = 0; column < tensor.columns; column += kRowChunk) {
      const int64_t count = Smaller(kRowChunk, tensor.columns - column);
      const float* rows[kRowTile];
      for (int r = 0; r < kRowTile; ++r) {
        // In place of a row behind the last one, the last one again.
        const int64_t begin = Smaller(row + r, last - 1) * tensor.columns + column;
        rows[r] = pieces.ToRead(r, tensor.element + begin, count);
      }
      AddChunk<Rank>(rows, columns + column, stride, count, scale, totals);
    }
    for (int r = 0; r < kRowTile; ++r) {
      for (int k = 0; k < Rank; ++k) {
        lanes[(row - first + r) * Rank + k] = Fold(totals[r][k]);
      }
    }
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
      EachRankTile(args.rank, [&](auto tile, int64_t k) {
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

constexpr int kRowsAdded = 4;  // At a time; divides kLaneSteps.

// Adds products of `count` columns of the matrix, in kRowsAdded rows, and of `Rank`
// columns of the factor.
template <int Rank>
inline __attribute__((always_inline)) void AddRows(
    const float* const (&rows)[kRowsAdded], const float* const (&left)[kRowsAdded],
    int64_t count, F scale, float* sums) {
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
                         for (int r = 0; r < kRowsAdded; ++r)
                           x[r] = Mul(scale, Load(from[r] + at));
#pragma GCC unroll 4
                         for (int k = 0; k < Rank; ++k) {
                           F sum = Load(sums + k * kSpan + i);
#pragma GCC unroll 4
                           for (int r = 0; r < kRowsAdded; ++r)
                             sum = Add(sum, Mul(x[r], factor[r][k]));
                           Store(sums + k * kSpan + i, sum);
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
    Pieces<const float, kRowsAdded, kSpan> pieces(args.x, args.size);
    // `rank` rows of kSpan sums each.
    const Zeros<float> totals(rank * kSpan), sums(rank * kSpan);
    const Zeros<float> no_row(kSpan), no_factor(rank);
    for (int64_t column = begin; column < end; column += kSpan) {
      const int64_t count = Smaller(kSpan, end - column);
      memset(totals, 0, rank * kSpan * sizeof(float));
      for (int64_t chunk = 0; chunk < tensor.rows; chunk += kLaneSteps) {
        memset(sums, 0, rank * kSpan * sizeof(float));
        const int64_t last = Smaller(tensor.rows, chunk + kLaneSteps);
        for (int64_t row = chunk; row < last; row += kRowsAdded) {
          const float *rows[kRowsAdded], *left[kRowsAdded];
          for (int r = 0; r < kRowsAdded; ++r) {
            const bool exists = row + r < last;
            const int64_t at = (row + r) * tensor.columns + column;
            rows[r] = exists ? pieces.ToRead(r, tensor.element + at, count) : no_row;
            left[r] = exists ? args.left + tensor.left + (row + r) * rank : no_factor;
          }
          EachRankTile(rank, [&](auto tile, int64_t k) {
            const float* factor[kRowsAdded];
            for (int r = 0; r < kRowsAdded; ++r) factor[r] = left[r] + k;
            AddRows<decltype(tile)::kValue>(rows, factor, count, scale,
                                            sums + k * kSpan);
          });
        }
        for (int64_t i = 0; i < rank * kSpan; i += kWidth) {
          Store(totals + i, Add(Load(totals + i), Load(sums + i)));
        }
      }
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t k = 0; k < rank; ++k) {
          to[(column + i) * rank + k] = totals[k * kSpan + i];
        }
      }
    }
  });
}

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

void Kernel(const Parallel& parallel, const MultiplyFactors& args) {
  const bool is_large = kStreams && args.size >= kStreamedFloats;
  const Units units(
      args, [](const MatrixTensor& t) { return t.rows; },
      [](const MatrixTensor& t) {
        return RoundUp(CeilDiv(kUnitElements, t.columns == 0 ? 1 : t.columns),
                       kRowsWritten);
      });
  units.Each(parallel, [&](const MatrixTensor& tensor, int64_t begin, int64_t end) {
    const float* const right = args.right + tensor.value;
    if (tensor.columns == 0) {
      PartOfVector<float> values(args.values, args.size);
      values.EachPiece(tensor.element + begin, tensor.element + end,
                       [&](float* p, int64_t at, int64_t count) {
                         memcpy(p, right + (at - tensor.element),
                                count * sizeof(float));
                       });
      return;
    }
    const Columns columns(right, tensor.columns, args.rank);
    Pieces<float, kRowsWritten, kSpan> pieces(args.values, args.size);
    for (int64_t row = begin; row < end; row += kRowsWritten) {
      const int64_t number = Smaller(kRowsWritten, end - row);
      const float* const left = args.left + tensor.left + row * args.rank;
      for (int64_t column = 0; column < tensor.columns; column += kSpan) {
        const int64_t count = Smaller(kSpan, tensor.columns - column);
        const int64_t first = tensor.element + row * tensor.columns + column;
        float* rows[kRowsWritten];
        bool streams = is_large;
        for (int r = 0; r < number; ++r) {
          rows[r] = pieces.ToWrite(r, first + r * tensor.columns, count);
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
          pieces.Wrote(rows[r], first + r * tensor.columns, count);
        }
      }
    }
    if (is_large) Fence();
  });
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
