// Error feedback with scaled signs, on a worker and on the server.

// Blocks are taken in batches of about this many elements: the second pass, which takes
// the scale out of p, then finds p in the cache. A larger block is a batch by itself.
constexpr int64_t kBatch = int64_t{1} << 16;

// Into the cache, where the second pass will look for it.
inline __attribute__((always_inline)) void PutCached(float* p, int64_t count,
                                                     const F (&group)[kParts]) {
  float buffer[kGroup];
  float* target = count < kGroup ? buffer : p;
  for (int part = 0; part < kParts; ++part) Store(target + part * kWidth, group[part]);
  if (count < kGroup) memcpy(p, buffer, count * sizeof(float));
}

// new_residual holds p: takes the scaled signs out of it, or puts back the old one.
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
  const float* values = reader.At(p, count);
  F left[kParts];
  EachPart([&](auto part) {
    constexpr int kFirst = part.kPart * kWidth;
    const F sent = Negate<part.kPart>(~word, Load(scale + kFirst));
    left[part.kPart] = Sub(Load(values + kFirst), sent);
  });
  PutCached(p, count, left);
}

// What SignErrorFeedback and MeanSignErrorFeedback share. `input_at(begin, end)`
// returns a function that makes p of a group: p(at, count, residual, group).
template <typename Args, typename InputAt>
void FeedBack(const Parallel& parallel, const Args& shared, int64_t bytes_per_chunk,
              const InputAt& input_at) {
  const Args args = shared;
  const bool moving = *args.moving;
  const F ratio = Set(*args.ratio);
  int64_t done = 0;
  for (int64_t first = 0, last; first < args.num_blocks; first = last) {
    const int64_t from = args.row_splits[first];
    last = first + 1;
    while (last < args.num_blocks && args.row_splits[last + 1] - from <= kBatch) ++last;
    const int64_t to = args.row_splits[last];
    const int64_t chunks = CeilDiv(to, kChunk);
    For(parallel, chunks - done, bytes_per_chunk, [&](int64_t begin, int64_t end) {
      const Args args = shared;  // A vector store may alias what others can see.
      auto input = input_at();
      GroupReader residual;
      int64_t block =
          BlockOf((done + begin) * kChunk, args.row_splits, args.num_blocks);
      for (int64_t chunk = done + begin; chunk < done + end; ++chunk) {
        const int64_t stop = Smaller(args.size, (chunk + 1) * kChunk);
        while (args.row_splits[block + 1] <= chunk * kChunk) ++block;
        D magnitudes[kChunk / kGroup] = {};
        for (int64_t at = chunk * kChunk; at < stop; at += kGroup) {
          const int64_t count = Smaller(kGroup, stop - at);
          F p[kParts];
          input(at, count, p);
          const float* e = residual.At(args.residual + at, count);
          for (int part = 0; part < kParts; ++part) {
            p[part] = Add(p[part], Mul(ratio, Load(e + part * kWidth)));
          }
          args.words[at / kGroup] = SignWord(p, nullptr, at) & LowBits(count);
          PutCached(args.new_residual + at, count, p);
          magnitudes[at / kGroup % (kChunk / kGroup)] = MagnitudeOfGroup(p);
        }
        if ((chunk + 1) * kChunk <= args.row_splits[block + 1]) {
          args.scratch[chunk + block] = SumLanes(SumGroups(magnitudes));
          continue;
        }
        EachChunk(args.new_residual, args.size, args.row_splits, args.num_blocks, chunk,
                  chunk + 1, [&](const float* values, int64_t slot) {
                    args.scratch[slot] = MagnitudeOfChunk(values);
                  });
      }
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

void Kernel(const Parallel& parallel, const MeanSignErrorFeedback& args) {
  const SignMean signs(args.sent_words, args.num_workers, WordsFor(args.size, 2));
  FeedBack(parallel, args, (12 + args.num_workers / 8) * kChunk, [&] {
    return [&, scale = Spread(args.sent_scale, args.num_workers, args.row_splits,
                              args.num_blocks)](int64_t at, int64_t count,
                                                F(&p)[kParts]) mutable {
      signs.At(at / kGroup, scale.At(at, count), p);
    };
  });
}
