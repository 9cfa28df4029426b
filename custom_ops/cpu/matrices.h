// The tensors of a vector of matrices, their rows, and their factors of few columns.

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

constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Calls body(tile, k) for tiles of the columns k < rank of factors: `tile` is a
// constant, the number of columns from k on, at most `Most`, which is a power of two.
template <int Most, typename Body>
inline __attribute__((always_inline)) void EachRankTile(int64_t rank, const Body& body,
                                                        int64_t k = 0) {
  for (; k + Most <= rank; k += Most) body(Constant<Most>(), k);
  if constexpr (Most > 1) EachRankTile<Most / 2>(rank, body, k);
}

// How many elements behind those that are read to prefetch: those of rows that are read
// soon. Pieces of rows are too short for a processor to see that they follow each
// other.
inline int64_t Ahead(int64_t rows) { return rows > 1024 ? rows : 1024; }

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

// The factor on the right of a matrix, column by column, each filled up with zeros:
// with a line more than needed, or columns of many lines would share few sets of the
// cache.
class Columns {
 public:
  Columns(const float* factor, int64_t rows, int64_t rank)
      : stride(RoundUp(rows, kLanesOfSum) + kLanesOfSum), data_(rank * stride) {
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
    if (!part_.Holds(begin, begin + count)) return Find(i, begin, count);
    return part_.At(begin);
  }

  T* ToWrite(int i, int64_t begin, int64_t count) {
    if (!part_.Holds(begin, begin + count)) part_.Seek(begin);
    return part_.Holds(begin, begin + count) ? part_.At(begin) : buffers_[i];
  }
  // After the piece has been written.
  void Wrote(int i, const float* piece, int64_t begin, int64_t count) {
    if (piece != buffers_[i]) return;
    part_.EachPiece(begin, begin + count, [&](T* p, int64_t at, int64_t number) {
      memcpy(p, piece + (at - begin), number * sizeof(T));
    });
  }

 private:
  __attribute__((noinline)) T* Find(int i, int64_t begin, int64_t count) {
    part_.Seek(begin);
    if (part_.Holds(begin, begin + count)) return part_.At(begin);
    part_.EachPiece(begin, begin + count, [&](T* p, int64_t at, int64_t number) {
      memcpy(buffers_[i] + (at - begin), p, number * sizeof(T));
    });
    return buffers_[i];
  }

  PartOfVector<T> part_;
  alignas(kCacheLine) float buffers_[Count][Most];
};
