// Rounding at random.

void Kernel(const Parallel& parallel, const RoundToBfloat16& args) {
  constexpr int64_t kDrawn = kRandomGroups * kGroup;
  const RoundKeys keys(ToStream(args.stream));
  For(parallel, CeilDiv(args.size, kDrawn), 6 * kDrawn,
      [&](int64_t begin, int64_t end) {
        uint32_t random[kDrawn], bits[kDrawn] = {};
        uint16_t rounded[kDrawn];
        for (int64_t tile = begin; tile < end; ++tile) {
          const int64_t at = tile * kDrawn, count = Smaller(kDrawn, args.size - at);
          RandomWords<kRandomGroups>(keys, static_cast<uint64_t>(at) / 4, random);
          memcpy(bits, args.x + at, count * sizeof(float));
          for (int64_t i = 0; i < kDrawn; ++i) {
            rounded[i] = static_cast<uint16_t>((bits[i] + (random[i] >> 16)) >> 16);
          }
          memcpy(args.rounded + at, rounded, count * sizeof(uint16_t));
        }
      });
}
