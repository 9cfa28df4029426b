// Updates by a vector, the search for NaN, sums with residuals, and residuals rounded
// at random.

void Kernel(const Parallel& parallel, const ApplyVector& args) {
  For(parallel, CeilDiv(args.size, kGroup), 16 * kGroup,
      [&](int64_t begin, int64_t end) {
        CutReader<kGroup> x(args.x, args.size);
        ValueWriter values(nullptr, args.update, args.size);
        for (int64_t group = begin; group < end; ++group) {
          const int64_t at = group * kGroup, count = Smaller(kGroup, args.size - at);
          F u[kParts];
          LoadGroup(x.At(at, count), u);
          values.Put(at, u);
        }
      });
}

inline bool IsFinite(const float* p, int64_t count, F scale) {
  GroupReader reader;
  uint32_t nonfinite = 0;
  for (int64_t at = 0; at < count; at += kGroup) {
    const float* group = reader.At(p + at, count - at);
    for (int i = 0; i < kGroup; i += kWidth) {
      nonfinite |= NonfiniteBits(Mul(scale, Load(group + i)));
    }
  }
  return nonfinite == 0;
}

void Kernel(const Parallel& parallel, const FirstNonfinite& args) {
  const int32_t num_parts = args.x.whole ? 1 : static_cast<int32_t>(args.x.num_parts);
  *args.part = num_parts;
  if (*args.is_finite) return;
  const F scale = Set(args.x.scale);
  For(parallel, CeilDiv(args.size, kGroup), 4 * kGroup,
      [&](int64_t begin, int64_t end) {
        PartOfVector<const float> x(args.x, args.size);
        int32_t first = num_parts;
        x.EachPiece(begin * kGroup, Smaller(end * kGroup, args.size),
                    [&](const float* p, int64_t, int64_t count) {
                      if (first < num_parts || IsFinite(p, count, scale)) return;
                      first = static_cast<int32_t>(x.index());
                    });
        int32_t before = __atomic_load_n(args.part, __ATOMIC_RELAXED);
        while (first < before &&
               !__atomic_compare_exchange_n(args.part, &before, first, true,
                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
      });
}

void Kernel(const Parallel& parallel, const AddScaled& args) {
  const F factor = Set(*args.factor);
  For(parallel, CeilDiv(args.size, kGroup), 2 * kGroup,
      [&](int64_t begin, int64_t end) {
        CutReader<kGroup> x(args.x, args.size);
        GroupReader y;
        GroupWriter total(args.total, args.size);
        for (int64_t group = begin; group < end; ++group) {
          const int64_t at = group * kGroup, count = Smaller(kGroup, args.size - at);
          F a[kParts], b[kParts];
          LoadGroup(x.At(at, count), a);
          LoadGroup(y.At(args.y + at, count), b);
          for (int part = 0; part < kParts; ++part) {
            a[part] = Add(a[part], Mul(factor, b[part]));
          }
          total.Put(at, a);
        }
      });
}

void Kernel(const Parallel& parallel, const RoundToBfloat16& args) {
  constexpr int64_t kTogether = 128;  // Four groups of eight blocks.
  const RandomStream stream = ToStream(args.stream);
  const RoundKeys keys(stream);
  For(parallel, CeilDiv(args.size, kTogether), 6 * kTogether,
      [&](int64_t begin, int64_t end) {
        uint32_t random[kTogether], bits[kTogether] = {};
        uint16_t rounded[kTogether];
        for (int64_t tile = begin; tile < end; ++tile) {
          const int64_t at = tile * kTogether,
                        count = Smaller(kTogether, args.size - at);
          RandomWords<4>(keys, stream.WordBlock(at), random);
          memcpy(bits, args.x + at, count * sizeof(float));
          for (int64_t i = 0; i < kTogether; ++i) {
            rounded[i] = static_cast<uint16_t>((bits[i] + (random[i] >> 16)) >> 16);
          }
          memcpy(args.rounded + at, rounded, count * sizeof(uint16_t));
        }
      });
}
