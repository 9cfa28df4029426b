// Error feedback with scaled signs, on a worker and on the server.

// Blocks are processed in batches of about this many elements, so that the second pass,
// which subtracts the scaled signs, finds p in the cache. A larger block is a batch.
constexpr int64_t kBatch = int64_t{1} << 16;

// Stores p in the cache, where the second pass will look for it.
inline __attribute__((always_inline)) void PutCached(float* p, int64_t count,
                                                     const F (&group)[kParts]) {
  alignas(kCacheLine) float buffer[kGroup];
  float* target = count < kGroup ? buffer : p;
  for (int part = 0; part < kParts; ++part) Store(target + part * kWidth, group[part]);
  if (count < kGroup) memcpy(p, buffer, count * sizeof(float));
}

inline __attribute__((always_inline)) void AddResidual(F ratio, const float* residual,
                                                       F (&p)[kParts]) {
  for (int part = 0; part < kParts; ++part) {
    p[part] = Add(p[part], Mul(ratio, Load(residual + part * kWidth)));
  }
}

// Subtracts the scaled signs from p.
inline __attribute__((always_inline)) void TakeSigns(uint32_t word, const float* scale,
                                                     F (&p)[kParts]) {
  EachPart([&](auto part) {
    const F sent = Negate<part.kPart>(~word, Load(scale + part.kPart * kWidth));
    p[part.kPart] = Sub(p[part.kPart], sent);
  });
}

// Subtracts the scaled signs from p, which new_residual holds, or restores the
// residual.
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
  F left[kParts];
  LoadGroup(reader.At(p, count), left);
  TakeSigns(word, scale, left);
  PutCached(p, count, left);
}

// Computes p of the chunks [begin, end). Its signs go into words, the sums of |p| into
// scratch, p itself to `place_of(chunk)`. `input_of()` returns a function
// input(at, count, group) that computes the vector to which the residual is added.
template <typename Args, typename InputOf, typename PlaceOf>
inline __attribute__((always_inline)) void AddUpChunks(const Args& shared,
                                                       const InputOf& input_of,
                                                       const PlaceOf& place_of,
                                                       int64_t begin, int64_t end) {
  const Args args = shared;  // A vector store may alias what others can see.
  const F ratio = Set(*args.ratio);
  auto input = input_of();
  GroupReader residual;
  int64_t block = BlockOf(begin * kChunk, args.row_splits, args.num_blocks);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = chunk * kChunk, stop = Smaller(args.size, first + kChunk);
    float* const place = place_of(chunk);
    while (args.row_splits[block + 1] <= first) ++block;
    D magnitudes[kChunk / kGroup] = {};
    for (int64_t at = first; at < stop; at += kGroup) {
      const int64_t count = Smaller(kGroup, stop - at);
      F p[kParts];
      input(at, count, p);
      AddResidual(ratio, residual.At(args.residual + at, count), p);
      args.words[at / kGroup] = SignWord(p, nullptr, at) & LowBits(count);
      PutCached(place + (at - first), count, p);
      magnitudes[(at - first) / kGroup] = MagnitudeOfGroup(p);
    }
    if (first + kChunk <= args.row_splits[block + 1]) {
      args.scratch[chunk + block] = SumLanes(SumGroups(magnitudes));
      continue;
    }
    EachBlock(place, args.size, args.row_splits, args.num_blocks, chunk, block,
              [&](const float* values, int64_t slot) {
                args.scratch[slot] = MagnitudeOfChunk(values);
              });
  }
}

// The common part of SignErrorFeedback and MeanSignErrorFeedback.
template <typename Args, typename InputOf>
void FeedBack(const Parallel& parallel, const Args& shared, int64_t bytes_per_chunk,
              const InputOf& input_of) {
  const Args args = shared;
  const bool moving = *args.moving;
  int64_t done = 0;
  for (int64_t first = 0, last; first < args.num_blocks; first = last) {
    const int64_t from = args.row_splits[first];
    last = first + 1;
    while (last < args.num_blocks && args.row_splits[last + 1] - from <= kBatch) ++last;
    const int64_t to = args.row_splits[last];
    const int64_t chunks = CeilDiv(to, kChunk);
    For(parallel, chunks - done, bytes_per_chunk, [&](int64_t begin, int64_t end) {
      AddUpChunks(
          shared, input_of,
          [p = args.new_residual](int64_t chunk) { return p + chunk * kChunk; },
          done + begin, done + end);
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
    return [&, x = CutReader<kGroup>(args.x, args.size), momentum = GroupReader(),
            new_momentum = GroupWriter(args.new_momentum, args.size)](
               int64_t at, int64_t count, F(&p)[kParts]) mutable {
      LoadGroup(x.At(at, count), p);
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

// The mean of the scaled signs of all workers, for one thread.
class SentMean {
 public:
  template <typename Args>
  explicit SentMean(const Args& args)
      : signs_(args.sent_words, args.num_workers, WordsFor(args.size, 2)),
        scale_(args.sent_scale, args.num_workers, args.row_splits, args.num_blocks) {}

  inline __attribute__((always_inline)) void operator()(int64_t at, int64_t count,
                                                        F (&mean)[kParts]) {
    signs_.At(at / kGroup, scale_.At(at, count), mean);
  }

 private:
  SignMean signs_;
  Spread scale_;
};

void Kernel(const Parallel& parallel, const MeanSignErrorFeedback& args) {
  FeedBack(parallel, args, (12 + args.num_workers / 8) * kChunk,
           [&] { return SentMean(args); });
}

void Kernel(const Parallel& parallel, const MeanSignSums& args) {
  For(parallel, CeilDiv(args.size, kChunk), (4 + args.num_workers / 8) * kChunk,
      [&](int64_t begin, int64_t end) {
        alignas(kCacheLine) float p[kChunk];
        AddUpChunks(
            args, [&] { return SentMean(args); }, [&](int64_t) { return p; }, begin,
            end);
      });
  for (int64_t b = 0; b < args.num_blocks; ++b) {
    args.l1[b] = OverChunks(args.scratch, args.row_splits, b, Plus);
  }
}

void Kernel(const Parallel& parallel, const MeanSignResidual& shared) {
  For(parallel, CeilDiv(shared.size, kGroup), (8 + shared.num_workers / 8) * kGroup,
      [&](int64_t begin, int64_t end) {
        const MeanSignResidual args = shared;
        const bool moving = *args.moving;
        const F ratio = Set(*args.ratio);
        SentMean sent(args);
        Spread scale(args.scale, 1, args.row_splits, args.num_blocks);
        GroupReader residual;
        GroupWriter new_residual(args.new_residual, args.size);
        for (int64_t word = begin; word < end; ++word) {
          const int64_t at = word * kGroup, count = Smaller(kGroup, args.size - at);
          const float* e = residual.At(args.residual + at, count);
          F p[kParts];
          if (moving) {
            sent(at, count, p);
            AddResidual(ratio, e, p);
            TakeSigns(args.words[word], scale.At(at, count), p);
          } else {
            LoadGroup(e, p);
          }
          new_residual.Put(at, p);
        }
      });
}
