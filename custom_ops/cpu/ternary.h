// Signs kept at random.

// Packs the digits of a tile's elements, four in each of `quads`, into its words.
inline void PackTileOfQuads(const uint8_t* quads, int64_t words, uint32_t* to) {
  int64_t w = 0;
  for (; w + 8 <= words; w += 8) PackQuads(quads + 5 * w, to + w);
  uint32_t last[8];
  if (w < words) PackQuads(quads + 5 * w, last);
  memcpy(to + w, last, (words - w) * sizeof(uint32_t));
}

class TernaryTiles {
 public:
  explicit TernaryTiles(const PackTernary& args)
      : args_(args),
        stream_(ToStream(args.stream)),
        keys_(stream_),
        x_(args.x, args.size),
        undecided_(stream_) {}

  void Pack(int64_t tile) {
    const int64_t first = tile * kTernaryTile;
    const int64_t last = Smaller(args_.size, first + kTernaryTile);
    DrawUpper(keys_, stream_, first, last, upper_);
    int64_t block = BlockOf(first, args_.row_splits, args_.num_blocks);
    for (int64_t at = first; at < last;) {
      while (args_.row_splits[block + 1] <= at) ++block;
      const int64_t count = Smaller(last, args_.row_splits[block + 1]) - at;
      if (count >= kDecided && IsOrdinary(args_.scale[block])) {
        ByNeed(block, at, at - first, count / kDecided);
        at += count / kDecided * kDecided;
      } else {
        Anyhow(block, at, at - first, Smaller(kDecided, last - at));
        at += kDecided;
      }
    }
    memset(quads_ + CeilDiv(last - first, kDecided) * kDecided / 4, 0, 8);
    undecided_.Decide(keys_, first, upper_, [this](const Undecided& one) {
      constexpr uint8_t kPowers[] = {1, 3, 9, 27};
      const uint8_t power = kPowers[one.place % 4];
      quads_[one.place / 4] += BitsOf(one.x) >> 31 ? -power : power;
    });
    PackTileOfQuads(quads_, CeilDiv(last - first, kTernaryDigits),
                    args_.words + first / kTernaryDigits);
  }

 private:
  // Packs groups within a block.
  void ByNeed(int64_t block, int64_t at, int64_t place, int64_t groups) {
    const float limit = args_.limit[block], scale = args_.scale[block];
    // A magnitude above the scale is kept, as the scale itself is.
    const F most = Set(limit < scale ? limit : scale), factor = Set(0x1p16f / scale);
    for (; groups > 0; --groups, at += kDecided, place += kDecided) {
      // Prefetches the next tile while the memory is idle.
      x_.Prefetch(at + kTernaryTile, kDecided);
      const float* p = x_.At(at, kDecided);
      F x[4], thresholds[4];
      for (int i = 0; i < 4; ++i) {
        x[i] = Load(p + i * kWidth);
        thresholds[i] = Mul(Min(most, Abs(x[i])), factor);
      }
      uint64_t bits;
      const Kept kept = Decide(thresholds, upper_ + place, &bits);
      TernaryQuads(x, kept, quads_ + place / 4);
      undecided_.Add(bits, [&](int i) {
        const float magnitude = FloatOf(BitsOf(p[i]) & 0x7FFFFFFF);
        return Undecided{static_cast<int32_t>(place + i), scale,
                         limit < magnitude ? limit : magnitude, p[i]};
      });
    }
  }

  // Packs at most a group, in any blocks from `block` on.
  void Anyhow(int64_t block, int64_t at, int64_t place, int64_t count) {
    alignas(kCacheLine) float limit[kDecided] = {}, scale[kDecided] = {};
    for (int64_t i = 0; i < count; ++i) {
      if (args_.row_splits[block + 1] <= at + i) ++block;
      limit[i] = args_.limit[block];
      scale[i] = args_.scale[block];
    }
    const float* p = x_.At(at, count);
    F uniforms[4];
    DrawUniforms(keys_, stream_, at, upper_ + place, uniforms);
    uint64_t kept = 0, minus = 0;
    for (int i = 0; i < 4; ++i) {
      const F x = Load(p + i * kWidth);
      const F magnitude = Min(Load(limit + i * kWidth), Abs(x));
      const F threshold = Mul(uniforms[i], Load(scale + i * kWidth));
      kept |= uint64_t{LessBits(threshold, magnitude)} << (i * kWidth);
      minus |= uint64_t{MinusBits(x)} << (i * kWidth);
    }
    const uint64_t valid = LowBits64(count);
    for (int i = 0; i < kDecided; i += 4) {
      const auto digits = [i](uint64_t bits) { return kTernary.low[bits >> i & 15]; };
      quads_[(place + i) / 4] = static_cast<uint8_t>(
          digits(valid) + digits(valid & kept & ~minus) - digits(valid & kept & minus));
    }
  }

  const PackTernary args_;
  const RandomStream stream_;
  const RoundKeys keys_;
  CutReader<kDecided> x_;
  UndecidedOfTile<kTernaryTile> undecided_;
  uint8_t upper_[kTernaryTile + kDrawn];
  uint8_t quads_[kTernaryTile / 4 + 64];
};

void Kernel(const Parallel& parallel, const PackTernary& args) {
  For(parallel, CeilDiv(args.size, kTernaryTile), 4 * kTernaryTile,
      [&](int64_t begin, int64_t end) {
        TernaryTiles tiles(args);
        for (int64_t tile = begin; tile < end; ++tile) tiles.Pack(tile);
      });
}
