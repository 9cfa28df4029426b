// Vectors for any processor, by the vector extension of GCC and Clang.
//
// This file states the interface; simd_avx2.h and simd_avx512.h implement it too.

// A width that every processor with vectors has: for wider vectors, compilers fall back
// to scalars.
constexpr int kWidth = 4;

using F = float __attribute__((vector_size(16)));    // kWidth float32
using I = int32_t __attribute__((vector_size(16)));  // kWidth int32
using U = uint32_t __attribute__((vector_size(16)));
using D = double __attribute__((vector_size(64)));  // kLanes float64

constexpr I kLaneBits = {1, 2, 4, 8};

template <typename To, typename From>
inline To LoadAs(const From* p) {
  To vector;
  memcpy(&vector, p, sizeof(vector));
  return vector;
}

inline F Load(const float* p) { return LoadAs<F>(p); }
inline F Set(float x) { return x - F{}; }
inline void Store(float* p, F a) { memcpy(p, &a, sizeof(a)); }
// Whether there are stores past the caches.
constexpr bool kStreams = false;
constexpr int kStreamAlignment = 16;
// Stores past the caches, at a multiple of kStreamAlignment bytes. Call Fence() before
// another thread reads.
inline void Stream(float* p, F a) { Store(p, a); }
inline void Fence() {}
inline F Add(F a, F b) { return a + b; }
inline F Sub(F a, F b) { return a - b; }
inline F Mul(F a, F b) { return a * b; }
inline F Div(F a, F b) { return a / b; }
inline F Sqrt(F a) {
  for (int i = 0; i < kWidth; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
inline F Abs(F a) { return (F)((I)a & 0x7FFFFFFF); }
// a < b ? a : b
inline F Min(F a, F b) { return a < b ? a : b; }
// a > b ? a : b
inline F Max(F a, F b) { return a > b ? a : b; }

inline uint32_t SumInts(I a) {
  const U u = (U)a;
  return (u[0] + u[2]) + (u[1] + u[3]);
}
// One bit a lane, the first lane's the lowest.
inline uint32_t LessBits(F a, F b) { return SumInts((I)(a < b) & kLaneBits); }
inline uint32_t MinusBits(F a) { return SumInts(((I)a < 0) & kLaneBits); }
inline uint32_t ZeroBits(F a) {
  return SumInts((((I)a & 0x7FFFFFFF) == 0) & kLaneBits);
}
inline uint32_t NonfiniteBits(F a) {
  return SumInts((((I)a & 0x7FFFFFFF) >= 0x7F800000) & kLaneBits);
}
// Lane i is `one` where bit Part * kWidth + i of `word` is 1, else `zero`.
template <int Part>
inline F Select(uint32_t word, F zero, F one) {
  const I bits = kLaneBits & static_cast<int32_t>(word >> (Part * kWidth) & 0xF);
  return bits != 0 ? one : zero;
}
// Lane i is -a where bit Part * kWidth + i of `word` is 1, else a.
template <int Part>
inline F Negate(uint32_t word, F a) {
  return Select<Part>(word, a, -a);
}

inline I LoadInts(const int32_t* p) { return LoadAs<I>(p); }
inline I SetInts(int32_t x) { return x - I{}; }
inline void StoreInts(int32_t* p, I a) { memcpy(p, &a, sizeof(a)); }
inline I And(I a, I b) { return a & b; }
inline I Or(I a, I b) { return a | b; }
inline I Xor(I a, I b) { return a ^ b; }
inline I AndNot(I a, I b) { return a & ~b; }
inline I MaxInts(I a, I b) { return a > b ? a : b; }
inline I MinInts(I a, I b) { return a < b ? a : b; }
inline int32_t LargestLane(I a) {
  int32_t most = a[0];
  for (int i = 1; i < kWidth; ++i) most = a[i] > most ? a[i] : most;
  return most;
}
// The larger of a and b where x < y, else a.
inline I MaxWhereLess(I a, I b, I x, I y) { return x < y ? MaxInts(a, b) : a; }
inline uint32_t LessBits(I a, I b) { return SumInts((a < b) & kLaneBits); }
inline uint32_t AtMostBits(I a, I b) { return SumInts((a <= b) & kLaneBits); }
// The number of ones.
inline int CountBits(uint32_t bits) { return __builtin_popcount(bits); }
// Whether StoreWhere() is quicker than a loop over the lanes.
constexpr bool kCompresses = false;
// Writes the lanes whose bits are 1, one after the other, and whatever it likes to the
// rest of kWidth places.
inline void StoreWhere(int32_t* p, uint32_t bits, I a) {
  for (int i = 0; i < kWidth; ++i) {
    *p = a[i];
    p += bits >> i & 1;
  }
}
// 0 where the lane's bit is 0.
inline I KeepWhere(uint32_t bits, I a) {
  return (SetInts(static_cast<int32_t>(bits)) & kLaneBits) != 0 ? a : I{};
}
// The bits of numbers, as integers that have the order of the numbers: the magnitude's
// bits, with the number's sign. Both zeros become 0.
inline I KeysOf(I bits) {
  const I magnitude = bits & 0x7FFFFFFF;
  return bits < 0 ? -magnitude : magnitude;
}
inline F NumbersOf(I keys) {
  const I negative = (I)(0 - (U)keys) | INT32_MIN;
  return (F)(keys < 0 ? negative : keys);
}
// The integers nearest to a * scale * other, halves to even, below 2^31; 0 where a is
// denormal, whatever this processor takes denormals for.
inline I RoundNormal(F a, F scale, F other) {
  I rounded;
  const F scaled = a * scale * other;
  for (int i = 0; i < kWidth; ++i) {
    // The sum 1.5 * 2^52 + n is rounded to a number whose low bits are the integer n.
    const double shifted = static_cast<double>(scaled[i]) + 6755399441055744.0;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    rounded[i] = static_cast<int32_t>(static_cast<uint32_t>(bits));
  }
  return ((I)a & 0x7F800000) != 0 ? rounded : I{};
}
inline I MagnitudeBits(F a) { return (I)Abs(a); }
inline F ToFloats(I a) { return __builtin_convertvector(a, F); }
// Towards zero.
inline I Truncate(F a) { return __builtin_convertvector(a, I); }
// a - floor(a), for numbers in [0, 2^31).
inline F Fraction(F a) { return a - ToFloats(Truncate(a)); }
// Lane i is p[lanes[i]]; lanes[i] < kWidth.
inline F Pick(const float* p, I lanes) {
  return F{p[lanes[0]], p[lanes[1]], p[lanes[2]], p[lanes[3]]};
}
// Lane i is p[lanes[i]]; lanes[i] < 16.
inline F PickOf16(const float* p, I lanes) { return Pick(p, lanes); }
// Lane i is p[lanes[i]].
inline F Gather(const float* p, I lanes) { return Pick(p, lanes); }
// Modulo 2^32.
inline I AddInts(I a, I b) { return (I)((U)a + (U)b); }
// Adds 1 where x < y.
inline I AddLess(I a, F x, F y) { return a - (x < y); }
// Adds 1 where x <= y.
inline I AddAtMost(I a, F x, F y) { return a - (x <= y); }
inline I AddLess(I a, I x, I y) { return a - (x < y); }
inline I SubInts(I a, I b) { return (I)((U)a - (U)b); }
// Shifts in the sign.
inline I ShiftRight(I a, int bits) { return a >> bits; }
// The lanes as bytes, in which they fit.
inline void StoreBytes(int8_t* p, I a) {
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<int8_t>(a[i]);
}
// One bit for each of 4 * kWidth bytes that is equal to `byte`.
inline uint64_t EqualBytes(const int8_t* p, int8_t byte) {
  uint64_t bits = 0;
  for (int i = 0; i < 4 * kWidth; ++i) bits |= uint64_t{p[i] == byte} << i;
  return bits;
}
inline I MulInts(I a, I b) { return (I)((U)a * (U)b); }
// The sums of the lanes of four vectors.
inline void SumFour(uint32_t* p, I a, I b, I c, I d) {
  p[0] = SumInts(a);
  p[1] = SumInts(b);
  p[2] = SumInts(c);
  p[3] = SumInts(d);
}
// Adds bit Part * kWidth + i of `word` to lane i.
template <int Part>
inline I AddBits(I a, uint32_t word) {
  const I bits = kLaneBits & static_cast<int32_t>(word >> (Part * kWidth) & 0xF);
  return a - (bits != 0);
}
// One bit a lane that is not 0.
inline uint32_t NonzeroBits(I a) { return SumInts((a != 0) & kLaneBits); }

inline D Widen(const float* p) {
  using Eight = float __attribute__((vector_size(32)));
  return __builtin_convertvector(LoadAs<Eight>(p), D);
}
inline D WidenWords(const uint32_t* p) {
  using Eight = uint32_t __attribute__((vector_size(32)));
  return __builtin_convertvector(LoadAs<Eight>(p), D);
}
// Row `row` of kLanes floats of a group's vectors.
inline D WidenRow(const F* group, int row) {
  return Widen(reinterpret_cast<const float*>(group + 2 * row));
}
// Adds the integers to some lanes of `sum`.
inline D AddWide(D sum, I a) {
  const D wide = {static_cast<double>(a[0]), static_cast<double>(a[1]),
                  static_cast<double>(a[2]), static_cast<double>(a[3])};
  return sum + wide;
}
inline D LoadDoubles(const double* p) { return LoadAs<D>(p); }
inline void StoreDoubles(double* p, D a) { memcpy(p, &a, sizeof(a)); }
inline D SetDoubles(double x) { return x - D{}; }
inline D Add(D a, D b) { return a + b; }
inline D Sub(D a, D b) { return a - b; }
inline D Mul(D a, D b) { return a * b; }
inline D Abs(D a) {
  using Bits = int64_t __attribute__((vector_size(64)));
  return (D)((Bits)a & INT64_MAX);
}
// For numbers in [0, 2^33).
inline D Floor(D a) {
  using Bits = int64_t __attribute__((vector_size(64)));
  return __builtin_convertvector(__builtin_convertvector(a, Bits), D);
}
// Lanes by halves: the last step of word_format.h's order.
inline double SumLanes(D a) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}
// p[i] is the sum of the lanes of v[i], by halves, for kWidth vectors.
inline void SumLanes(float* p, const F* v) {
  for (int i = 0; i < kWidth; ++i) {
    p[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
  }
}
// low[0], high[0], low[1], ... as sixteen float32.
inline void StorePairs(float* p, D low, D high) {
  for (int i = 0; i < 8; ++i) {
    p[2 * i] = static_cast<float>(low[i]);
    p[2 * i + 1] = static_cast<float>(high[i]);
  }
}

// The keys of Philox' rounds, which all blocks share.
struct RoundKeys {
  explicit RoundKeys(RandomStream s) : stream(s) {}
  RandomStream stream;
};

// The words of the Philox blocks [block, block + 8 * Groups).
template <int Groups>
inline void RandomWords(const RoundKeys& keys, uint64_t block, uint32_t* words) {
  for (int i = 0; i < 8 * Groups; ++i) Philox(keys.stream, block + i, words + 4 * i);
}

// The words of these blocks.
inline void RandomWordsOf(const RoundKeys& keys, const uint64_t (&blocks)[8],
                          uint32_t* words) {
  for (int i = 0; i < 8; ++i) Philox(keys.stream, blocks[i], words + 4 * i);
}

// The lanes are bytes times 2^Bits.
template <int Bits>
inline I WidenBytes(const uint8_t* p) {
  using Bytes = uint8_t __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(LoadAs<Bytes>(p), I) << Bits;
}

// Uniform() of each lane.
inline F Uniforms(const uint8_t* upper, const uint16_t* lower) {
  F uniform;
  for (int i = 0; i < kWidth; ++i) uniform[i] = Uniform(upper[i], lower[i]);
  return uniform;
}

// Which of 4 * kWidth elements are kept.
using Kept = uint64_t;
// One bit an element.
inline uint64_t KeptBits(Kept kept) { return kept; }

// An element is kept if its uniform number is below its threshold, which is given times
// 2^16 and may be wrong by 1 / 32. Returns the elements that the upper bits decide to
// keep; *undecided has a bit for each element that they do not decide. A threshold that
// is not positive, NaN or at least 2^31 counts as 0.
inline Kept Decide(const F (&thresholds)[4], const uint8_t* upper,
                   uint64_t* undecided) {
  Kept kept = 0;
  *undecided = 0;
  for (int i = 0; i < 4; ++i) {
    const F t = thresholds[i];
    const I counts = (t > 0) & (t < 2147483648.0f);
    // The nearest integer is less than 1 away.
    const F near = Min(Add(t, Set(0.5f)), Set(65535.0f));
    const I nearest = Truncate((F)((I)near & counts));
    const I low = (MaxInts(nearest, SetInts(1)) - 1) >> 8, high = nearest >> 8;
    const I drawn = WidenBytes<0>(upper + i * kWidth);
    const I is_kept = drawn < low;
    const I is_lost = drawn > high;
    kept |= Kept{SumInts(is_kept & kLaneBits)} << (i * kWidth);
    *undecided |= uint64_t{SumInts(~(is_kept | is_lost) & kLaneBits)} << (i * kWidth);
  }
  return kept;
}

// Writes kWidth numbers: the codes of four elements as digits of base 3. The code is
// that of the sign if the element is kept, else 1.
inline void TernaryQuads(const F (&x)[4], Kept kept, uint8_t* quads) {
  // The sum of the powers of 3 whose bits are set.
  constexpr uint8_t kSums[16] = {0,  1,  3,  4,  9,  10, 12, 13,
                                 27, 28, 30, 31, 36, 37, 39, 40};
  for (int i = 0; i < 4; ++i, kept >>= kWidth) {
    const uint32_t minus = MinusBits(x[i]);
    quads[i] = kSums[15] + kSums[kept & ~minus & 15] - kSums[kept & minus & 15];
  }
}

// Packs eight words. Reads 64 bytes, of which 40 count.
inline void PackQuads(const uint8_t* quads, uint32_t* words) {
  for (int w = 0; w < 8; ++w, quads += 5) {
    uint32_t word = 0;
    for (int i = 4; i >= 0; --i) word = 81 * word + quads[i];
    words[w] = word;
  }
}
