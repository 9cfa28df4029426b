// Single elements of a vector: the largest, cleared ones, and vectors of few elements.

// -- The largest ------------------------------------------------------------------

// Calls body(magnitude, j) for the elements of groups [begin, end) that reach a
// magnitude, in their order.
template <typename Body>
void EachReaching(const FindLargest& args, int64_t begin, int64_t end, int32_t least,
                  const Body& body) {
  CutReader<kGroup> x(args.x, args.size);
  const I bound = SetInts(least);
  alignas(kCacheLine) int32_t magnitudes[kGroup];
  for (int64_t group = begin; group < end; ++group) {
    const int64_t at = group * kGroup, count = Smaller(kGroup, args.size - at);
    const float* const values = x.At(at, count);
    uint32_t below = 0;
    for (int i = 0; i < kGroup; i += kWidth) {
      const I magnitude = MagnitudeBits(Load(values + i));
      StoreInts(magnitudes + i, magnitude);
      below |= LessBits(magnitude, bound) << i;
    }
    for (uint32_t left = ~below & LowBits(count); left != 0; left &= left - 1) {
      const int i = __builtin_ctz(left);
      body(magnitudes[i], at + i);
    }
  }
}

// Magnitudes are compared digit by digit.
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;

// Counts the elements that reach the magnitude `least` and whose magnitude without its
// lower `shift` + kDigitBits bits is `upper`, by the digit above the lower `shift`
// bits. Returns how many there are.
int64_t CountDigits(const Parallel& parallel, const FindLargest& args, int shift,
                    int32_t upper, int32_t least, int64_t* counts) {
  memset(counts, 0, kDigits * sizeof(*counts));
  For(parallel, CeilDiv(args.size, kGroup), 4 * kGroup,
      [&](int64_t begin, int64_t end) {
        // Several tables, since neighbours often have the same digit.
        constexpr int kTables = 4;
        int32_t own[kTables][kDigits] = {};
        EachReaching(args, begin, end, least, [&](int32_t magnitude, int64_t j) {
          const int32_t digits = magnitude >> shift;
          own[j % kTables][digits % kDigits] += digits >> kDigitBits == upper;
        });
        for (const auto& table : own) {
          for (int digit = 0; digit < kDigits; ++digit) {
            if (table[digit] == 0) continue;
            __atomic_fetch_add(counts + digit, table[digit], __ATOMIC_RELAXED);
          }
        }
      });
  int64_t total = 0;
  for (int digit = 0; digit < kDigits; ++digit) total += counts[digit];
  return total;
}

// Returns a magnitude that most likely at least `count` elements reach, but few more
// than twice as many, by a sample. Its digits are 0 but the first.
int32_t LikelyReached(const FindLargest& args) {
  constexpr int64_t kOneIn = 64;
  constexpr int kShift = 2 * kDigitBits;
  int64_t counts[kDigits] = {};
  CutReader<kGroup> x(args.x, args.size);
  for (int64_t at = 0; at + kGroup <= args.size; at += kOneIn * kGroup) {
    const float* const values = x.At(at, kGroup);
    for (int i = 0; i < kGroup; ++i) {
      ++counts[(BitsOf(values[i]) & kMagnitude) >> kShift];
    }
  }
  int64_t wanted = 2 * args.count / kOneIn + kGroup;
  int32_t digit = kDigits;
  while (digit > 0 && wanted > 0) wanted -= counts[--digit];
  return digit << kShift;
}

void Kernel(const Parallel& parallel, const FindLargest& args) {
  if (args.count == 0) return;
  int64_t counts[kDigits];
  int shift = 2 * kDigitBits;
  if (CountDigits(parallel, args, shift, 0, LikelyReached(args), counts) < args.count) {
    CountDigits(parallel, args, shift, 0, 0, counts);
  }
  // The bits of the least magnitude that is taken, a digit after the other, and how
  // many elements of this magnitude are taken.
  int32_t least = 0;
  int64_t equal = args.count;
  while (true) {
    int32_t digit = kDigits - 1;
    while (equal > counts[digit]) equal -= counts[digit--];
    least = least << kDigitBits | digit;
    if (shift == 0) break;
    CountDigits(parallel, args, shift - kDigitBits, least, least << shift, counts);
    shift -= kDigitBits;
  }
  int32_t* next = args.indices;
  EachReaching(args, 0, CeilDiv(args.size, kGroup), least,
               [&](int32_t magnitude, int64_t j) {
                 if (magnitude > least || equal-- > 0)
                   *next++ = static_cast<int32_t>(j);
               });
}

// -- Cleared ----------------------------------------------------------------------

void Kernel(const Parallel& parallel, const ClearElements& args) {
  if (args.cleared != args.x) {
    For(parallel, args.size, sizeof(float), [&](int64_t begin, int64_t end) {
      memcpy(args.cleared + begin, args.x + begin, (end - begin) * sizeof(float));
    });
  }
  for (int64_t i = 0; i < args.count; ++i) {
    if (args.indices[i] >= 0) args.cleared[args.indices[i]] = 0;
  }
}

// -- The mean of few elements -----------------------------------------------------

void Kernel(const Parallel& parallel, const MeanOfPairs& args) {
  For(parallel, args.size, sizeof(float), [&](int64_t begin, int64_t end) {
    memset(args.mean + begin, 0, (end - begin) * sizeof(float));
  });
  const int64_t pairs = args.num_workers * args.num_pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    if (args.indices[i] >= 0) args.mean[args.indices[i]] += args.values[i];
  }
  if (args.num_workers == 1) return;
  // An element that several workers have is divided once. A bit for each tells whether
  // it has been.
  const Zeros<uint32_t> divided(CeilDiv(args.size, 32));
  const auto workers = static_cast<float>(args.num_workers);
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t index = args.indices[i];
    if (index < 0) continue;
    const uint32_t bit = uint32_t{1} << index % 32;
    if ((divided[index / 32] & bit) != 0) continue;
    divided[index / 32] |= bit;
    args.mean[index] /= workers;
  }
}
