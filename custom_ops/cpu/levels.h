// Levels of blocks: elements are rounded to them, and codes are looked up.

// Up to this many levels are looked up in registers.
constexpr int64_t kFewLevels = 16;

template <bool kFew>
inline F LookUp(const float* table, I codes) {
  return kFew ? PickOf16(table, codes) : Gather(table, codes);
}

// Returns the table of a block's levels. A few levels are copied to a buffer from which
// sixteen can be read.
template <bool kFew>
inline const float* TableOf(const float* levels, int64_t count, float* buffer) {
  if (!kFew) return levels;
  memcpy(buffer, levels, count * sizeof(float));
  return buffer;
}

// Calls piece(block, from, to) for the part of [begin, end) that lies in each block.
// The pieces are in order, so that `piece` may work in whole groups: the next piece
// overwrites what a group has written past the end of its own piece.
template <typename Piece>
inline void EachBlockOf(const int64_t* row_splits, int64_t num_blocks, int64_t begin,
                        int64_t end, const Piece& piece) {
  int64_t block = BlockOf(begin, row_splits, num_blocks);
  for (; begin < end; ++block) {
    const int64_t to = Smaller(end, row_splits[block + 1]);
    piece(block, begin, to);
    begin = to;
  }
}

// Writes the codes of a group: k, plus what is drawn if `random` is given.
template <bool kFew>
inline __attribute__((always_inline)) void CodeGroup(const float* x, const float* table,
                                                     int64_t count,
                                                     const uint32_t* random,
                                                     int32_t* codes) {
  F value[kParts];
  I k[kParts];
  LoadGroup(x, value);
  for (int part = 0; part < kParts; ++part) k[part] = SetInts(0);
  for (int64_t inner = 1; inner < count - 1; ++inner) {
    const F level = Set(table[inner]);
    EachPart([&](auto part) {
      k[part.kPart] = AddAtMost(k[part.kPart], level, value[part.kPart]);
    });
  }
  EachPart([&](auto part) {
    constexpr int kPart = part.kPart, kFirst = kPart * kWidth;
    if (random != nullptr) {
      const F low = LookUp<kFew>(table, k[kPart]);
      const F high = LookUp<kFew>(table + 1, k[kPart]);
      k[kPart] = AddLess(k[kPart], Mul(Uniforms(random + kFirst), Sub(high, low)),
                         Sub(value[kPart], low));
    }
    StoreInts(codes + kFirst, k[kPart]);
  });
}

// Returns the number of words of a tile that consists of whole words and whole groups.
inline int64_t GroupTile(const Digits& digits) {
  return kGroup * (kTile / kGroup / digits.count());
}

template <bool kFew>
void PackTiles(const PackLevels& shared, const Digits& digits, int64_t begin,
               int64_t end) {
  // A copy, because a vector store may alias an object that others can see.
  const PackLevels args = shared;
  const int64_t tile = GroupTile(digits), elements = tile * digits.count();
  const bool draws = args.stream != nullptr;
  const RoundKeys keys(draws ? ToStream(args.stream) : RandomStream{});
  constexpr int64_t kDrawn = kRandomGroups * kGroup;
  uint32_t random[kTile + kDrawn] = {};
  int32_t codes[kTile + kSlack];
  float few[kFewLevels + 1] = {};  // Sixteen can be read from the second level on, too.
  CutReader<kGroup> x(args.x, args.size);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * elements;
    const int64_t last = Smaller(args.size, first + elements);
    for (int64_t at = first; at < last; at += kDrawn) {
      if (draws) {
        RandomWords<kRandomGroups>(keys, static_cast<uint64_t>(at) / 4,
                                   random + (at - first));
      }
      // The memory is read while the random words are computed.
      for (int64_t line = 0; line < kDrawn; line += 16) x.Prefetch(at + line);
    }
    EachBlockOf(args.row_splits, args.num_blocks, first, last,
                [&](int64_t block, int64_t from, int64_t to) {
                  const float* levels = args.levels + block * args.count;
                  const float* table = TableOf<kFew>(levels, args.count, few);
                  for (int64_t at = from; at < to; at += kGroup) {
                    const float* p = x.At(at, Smaller(kGroup, args.size - at));
                    CodeGroup<kFew>(p, table, args.count,
                                    draws ? random + (at - first) : nullptr,
                                    codes + (at - first));
                  }
                });
    digits.Pack(codes, last - first, kTile + kSlack, args.words + unit * tile);
  }
}

void Kernel(const Parallel& parallel, const PackLevels& args) {
  const Digits digits(args.count - (args.stream == nullptr));
  const int64_t elements = GroupTile(digits) * digits.count();
  For(parallel, CeilDiv(args.size, elements), 4 * elements,
      [&](int64_t begin, int64_t end) {
        if (args.count <= kFewLevels) {
          PackTiles<true>(args, digits, begin, end);
        } else {
          PackTiles<false>(args, digits, begin, end);
        }
      });
}

// Looks up the levels of one worker's codes, of the elements from `first` to `last`.
template <bool kFew>
void LookUpTile(const MeanOfLevels& args, int64_t worker, const int32_t* codes,
                int64_t first, int64_t last, float* values) {
  float few[kFewLevels] = {};
  EachBlockOf(args.row_splits, args.num_blocks, first, last,
              [&](int64_t block, int64_t from, int64_t to) {
                const int64_t row = worker * args.num_blocks + block;
                const float* table =
                    TableOf<kFew>(args.levels + row * args.count, args.count, few);
                for (int64_t at = from - first; at < to - first; at += kWidth) {
                  Store(values + at, LookUp<kFew>(table, LoadInts(codes + at)));
                }
              });
}

template <bool kFew>
void MeanTiles(const MeanOfLevels& shared, const Digits& digits, int64_t begin,
               int64_t end) {
  // A copy, because a vector store may alias an object that others can see.
  const MeanOfLevels args = shared;
  const int64_t tile = GroupTile(digits), elements = tile * digits.count();
  const int64_t words = WordsFor(args.size, args.count);
  const DivideBy divide(args.num_workers);
  ValueWriter values(args.values, args.update, args.size);
  int32_t codes[kTile + kSlack] = {};  // Each code is a place in a table.
  float sum[kTile + kSlack], next[kTile + kSlack];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * elements;
    const int64_t last = Smaller(args.size, first + elements);
    for (int64_t worker = 0; worker < args.num_workers; ++worker) {
      digits.Sum(args.words + worker * words + unit * tile, 1, 0,
                 Smaller(tile, words - unit * tile), codes);
      LookUpTile<kFew>(args, worker, codes, first, last, worker == 0 ? sum : next);
      for (int64_t at = 0; worker > 0 && at < last - first; at += kWidth) {
        Store(sum + at, Add(Load(sum + at), Load(next + at)));
      }
    }
    for (int64_t at = first; at < last; at += kGroup) {
      F mean[kParts];
      LoadGroup(sum + (at - first), mean);
      for (F& part : mean) part = divide(part);
      values.Put(at, mean);
    }
  }
}

void Kernel(const Parallel& parallel, const MeanOfLevels& args) {
  const Digits digits(args.count);
  const int64_t elements = GroupTile(digits) * digits.count();
  For(parallel, CeilDiv(args.size, elements), 4 * elements * (1 + args.num_workers),
      [&](int64_t begin, int64_t end) {
        if (args.count <= kFewLevels) {
          MeanTiles<true>(args, digits, begin, end);
        } else {
          MeanTiles<false>(args, digits, begin, end);
        }
      });
}
