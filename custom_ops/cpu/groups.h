// Elements by groups of 32, the elements of a base-2 word: reading and writing them,
// and values of blocks spread over them. Chunks and tiles are multiples of a group
// which fit into the first-level cache. The last group of a vector goes through a
// padded buffer, so that there is one path for all lengths.

constexpr int kGroup = 32;
constexpr int kParts = kGroup / kWidth;

// Vectors of at least this many floats are written past the caches. They would be
// evicted before they are read, and so no line is loaded only to be overwritten.
constexpr int64_t kStreamedFloats = int64_t{1} << 22;
constexpr bool IsStreamed(int64_t size) { return kStreams && size >= kStreamedFloats; }

// The alignment of buffers. Between stores past the caches, a store that crosses two
// lines flushes the processor's half-filled buffers. On AMD Zen 3 the signs of a
// momentum then took five times as long.
constexpr size_t kCacheLine = 64;

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

// Divides sums of N terms.
class DivideBy {
 public:
  explicit DivideBy(int64_t n)
      : divisor_(Set(static_cast<float>(n))),
        reciprocal_(Set(1 / static_cast<float>(n))),
        is_power_of_two_((n & (n - 1)) == 0) {}

  // The result is the same, because the reciprocal of a power of two is exact.
  F operator()(F sum) const {
    return is_power_of_two_ ? Mul(sum, reciprocal_) : Div(sum, divisor_);
  }

 private:
  F divisor_, reciprocal_;
  bool is_power_of_two_;
};

// A constant for lambdas.
template <auto Value>
struct Constant {
  static constexpr auto kValue = Value;
};

// How many elements ahead of a group to prefetch: a processor does not look past the
// end of a page.
constexpr int64_t kAhead = 512;

inline void PrefetchAfter(const float* group) {
  for (int64_t i = 0; i < kGroup; i += 16) __builtin_prefetch(group + kAhead + i);
}

// A group of a vector for reading: in place, or, if fewer than 32 elements are left, in
// a buffer padded with zeros.
class GroupReader {
 public:
  const float* At(const float* p, int64_t count) {
    if (count >= kGroup) {
      PrefetchAfter(p);
      return p;
    }
    memset(buffer_, 0, sizeof(buffer_));
    memcpy(buffer_, p, count * sizeof(float));
    return buffer_;
  }

 private:
  alignas(kCacheLine) float buffer_[kGroup];
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

// The part of a vector that was read or written last.
template <typename T>
class PartOfVector {
 public:
  PartOfVector(const CutVector<T>& vector, int64_t size)
      : vector_(vector),
        data_(vector.whole),
        begin_(0),
        end_(vector.whole == nullptr ? 0 : size) {}

  bool Holds(int64_t begin, int64_t end) const {
    return begin >= begin_ && end <= end_;
  }
  T* At(int64_t element) const { return data_ + (element - begin_); }
  int64_t index() const { return index_; }

  void Seek(int64_t element) {
    if (Holds(element, element + 1)) return;
    index_ = BlockOf(element, vector_.splits, vector_.num_parts);
    data_ = vector_.parts[index_];
    begin_ = vector_.splits[index_];
    end_ = vector_.splits[index_ + 1];
  }

  // Calls piece(p, at, count) for each part's share of [begin, end): the elements
  // [at, at + count) are at p.
  template <typename Piece>
  void EachPiece(int64_t begin, int64_t end, const Piece& piece) {
    while (begin < end) {
      Seek(begin);
      const int64_t count = Smaller(end, end_) - begin;
      piece(At(begin), begin, count);
      begin += count;
    }
  }

 private:
  CutVector<T> vector_;
  T* data_;
  int64_t begin_, end_;
  int64_t index_ = 0;
};

// Reads groups of a vector that may be cut and has a scale. `Count` elements that lie
// in one part are read in place if the scale is 1; all others are copied to the buffer.
template <int64_t Count>
class CutReader {
 public:
  CutReader(const CutVector<const float>& vector, int64_t size)
      : part_(vector, size), scale_(vector.scale) {}

  // Elements [begin, begin + count); count is below `Count` only at the vector's end.
  inline __attribute__((always_inline)) const float* At(int64_t begin, int64_t count) {
    if (!part_.Holds(begin, begin + Count)) return Find(begin, count);
    const float* const p = part_.At(begin);
    if constexpr (Count == kGroup) PrefetchAfter(p);
    return scale_ == 1 ? p : Multiplied(p);
  }

  __attribute__((noinline)) void Copy(int64_t begin, int64_t end, float* to) {
    part_.EachPiece(begin, end, [&](const float* p, int64_t at, int64_t count) {
      // A product may flush denormals, even a product with 1.
      memcpy(to + (at - begin), p, count * sizeof(float));
      for (int64_t i = 0; scale_ != 1 && i < count; ++i) to[at - begin + i] *= scale_;
    });
  }

  // Prefetches `count` elements, if they are within the current part.
  inline __attribute__((always_inline)) void Prefetch(int64_t element,
                                                      int64_t count) const {
    if (!part_.Holds(element, element + count)) return;
    const float* p = part_.At(element);
    for (int64_t line = 0; line < count; line += 16) __builtin_prefetch(p + line);
  }

 private:
  __attribute__((noinline)) const float* Find(int64_t begin, int64_t count) {
    part_.Seek(begin);
    if (part_.Holds(begin, begin + Count)) return At(begin, count);
    memset(buffer_, 0, sizeof(buffer_));
    Copy(begin, begin + count, buffer_);
    return buffer_;
  }

  inline __attribute__((always_inline)) const float* Multiplied(const float* p) {
    const F scale = Set(scale_);
    for (int64_t i = 0; i < Count; i += kWidth) {
      Store(buffer_ + i, Mul(scale, Load(p + i)));
    }
    return buffer_;
  }

  PartOfVector<const float> part_;
  float scale_;
  alignas(kCacheLine) float buffer_[Count];
};

// Whether vectors can be written past the caches from here on.
inline bool CanStream(const float* to) {
  return reinterpret_cast<uintptr_t>(to) % kStreamAlignment == 0;
}

// Writes groups of a vector.
class GroupWriter {
 public:
  GroupWriter(const CutVector<float>& vector, int64_t size)
      : part_(vector, size), size_(size), is_large_(IsStreamed(size)) {
    SetStreams(0);
  }
  ~GroupWriter() {
    if (is_large_) Fence();
  }

  // The group at element `begin`, a multiple of 32.
  inline __attribute__((always_inline)) void Put(int64_t begin,
                                                 const F (&group)[kParts]) {
    if (!part_.Holds(begin, begin + kGroup) && !Find(begin)) {
      float buffer[kGroup];
      for (int part = 0; part < kParts; ++part)
        Store(buffer + part * kWidth, group[part]);
      PutPieces(begin, buffer);
      return;
    }
    float* p = part_.At(begin);
    if (streams_) {
      for (int part = 0; part < kParts; ++part) Stream(p + part * kWidth, group[part]);
    } else {
      for (int part = 0; part < kParts; ++part) Store(p + part * kWidth, group[part]);
    }
  }

 private:
  // Returns whether one part holds the group.
  __attribute__((noinline)) bool Find(int64_t begin) {
    part_.Seek(begin);
    SetStreams(begin);
    return part_.Holds(begin, begin + kGroup);
  }

  __attribute__((noinline)) void PutPieces(int64_t begin, const float* group) {
    const int64_t end = Smaller(size_, begin + kGroup);
    part_.EachPiece(begin, end, [&](float* p, int64_t at, int64_t count) {
      memcpy(p, group + (at - begin), count * sizeof(float));
    });
    SetStreams(end);
  }

  // All groups of the part have the alignment of the group at `begin`.
  void SetStreams(int64_t begin) { streams_ = is_large_ && CanStream(part_.At(begin)); }

  PartOfVector<float> part_;
  int64_t size_;
  bool is_large_, streams_;
};

// Per-block values spread over the elements of a group. Groups within a block need no
// further work.
class Spread {
 public:
  // `values` has `rows` rows of num_blocks values.
  Spread(const float* values, int64_t rows, const int64_t* row_splits,
         int64_t num_blocks)
      : values_(values),
        rows_(rows),
        row_splits_(row_splits),
        num_blocks_(num_blocks),
        buffer_(new (std::align_val_t{kCacheLine}) float[rows * kGroup]) {}
  ~Spread() { operator delete[](buffer_, std::align_val_t{kCacheLine}); }
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
    // Most often it is the next block.
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
    begin_ = end_ = -1;  // The values serve this group only.
  }

  const float* values_;
  int64_t rows_;
  const int64_t* row_splits_;
  int64_t num_blocks_;
  int64_t block_ = -1, begin_ = -1, end_ = -1;
  float* buffer_;
};

RandomStream ToStream(const uint64_t* stream) {
  return {stream[0], stream[1], stream[2]};
}
