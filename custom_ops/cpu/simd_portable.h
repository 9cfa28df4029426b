// Vectors as plain arrays: for any processor, and what a compiler makes of them.
//
// This file states the interface; simd_avx2.h and simd_avx512.h implement it too.

constexpr int kWidth = 8;

struct F {  // kWidth float32
  float v[kWidth];
};
struct I {  // kWidth int32
  int32_t v[kWidth];
};
struct D {  // kLanes float64
  double v[kLanes];
};

#define TFGRADCOMP_EACH(expression)                    \
  do {                                                 \
    for (int i = 0; i < 8; ++i) r.v[i] = (expression); \
    return r;                                          \
  } while (false)

inline F Load(const float* p) {
  F r;
  TFGRADCOMP_EACH(p[i]);
}
inline F Set(float x) {
  F r;
  TFGRADCOMP_EACH(x);
}
inline void Store(float* p, F a) { memcpy(p, a.v, sizeof(a)); }
// Past the caches; p is aligned to a vector. Fence() before others may read.
inline void Stream(float* p, F a) { Store(p, a); }
inline void Fence() {}
inline F Add(F a, F b) {
  F r;
  TFGRADCOMP_EACH(a.v[i] + b.v[i]);
}
inline F Sub(F a, F b) {
  F r;
  TFGRADCOMP_EACH(a.v[i] - b.v[i]);
}
inline F Mul(F a, F b) {
  F r;
  TFGRADCOMP_EACH(a.v[i] * b.v[i]);
}
inline F Div(F a, F b) {
  F r;
  TFGRADCOMP_EACH(a.v[i] / b.v[i]);
}
inline F Neg(F a) {
  F r;
  TFGRADCOMP_EACH(-a.v[i]);
}
inline F Abs(F a) {
  F r;
  TFGRADCOMP_EACH(__builtin_fabsf(a.v[i]));
}
// a < b ? a : b
inline F Min(F a, F b) {
  F r;
  TFGRADCOMP_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}

// One bit a lane, the first lane's the lowest.
inline uint32_t LessBits(F a, F b) {
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= uint32_t{a.v[i] < b.v[i]} << i;
  return bits;
}
inline uint32_t MinusBits(F a) {
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= (BitsOf(a.v[i]) >> 31) << i;
  return bits;
}
inline uint32_t ZeroBits(F a) {
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= uint32_t{IsZero(a.v[i])} << i;
  return bits;
}
// Lane i is `one` where bit Part * kWidth + i of `word` is 1, else `zero`.
template <int Part>
inline F Select(uint32_t word, F zero, F one) {
  F r;
  TFGRADCOMP_EACH((word >> (Part * kWidth + i)) & 1 ? one.v[i] : zero.v[i]);
}

inline I LoadInts(const int32_t* p) {
  I r;
  TFGRADCOMP_EACH(p[i]);
}
inline I SetInts(int32_t x) {
  I r;
  TFGRADCOMP_EACH(x);
}
inline void StoreInts(int32_t* p, I a) { memcpy(p, a.v, sizeof(a)); }
inline I And(I a, I b) {
  I r;
  TFGRADCOMP_EACH(a.v[i] & b.v[i]);
}
inline I Or(I a, I b) {
  I r;
  TFGRADCOMP_EACH(a.v[i] | b.v[i]);
}
inline I Xor(I a, I b) {
  I r;
  TFGRADCOMP_EACH(a.v[i] ^ b.v[i]);
}
inline I AndNot(I a, I b) {
  I r;
  TFGRADCOMP_EACH(a.v[i] & ~b.v[i]);
}
inline I MaxInts(I a, I b) {
  I r;
  TFGRADCOMP_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
inline I MagnitudeBits(F a) {
  I r;
  TFGRADCOMP_EACH(BitsOf(a.v[i]) & 0x7FFFFFFF);
}
inline F ToFloats(I a) {
  F r;
  TFGRADCOMP_EACH(static_cast<float>(a.v[i]));
}
// Modulo 2^32.
inline I AddInts(I a, I b) {
  I r;
  TFGRADCOMP_EACH(static_cast<int32_t>(uint32_t(a.v[i]) + uint32_t(b.v[i])));
}
inline I MulInts(I a, I b) {
  I r;
  TFGRADCOMP_EACH(static_cast<int32_t>(uint32_t(a.v[i]) * uint32_t(b.v[i])));
}
inline uint32_t SumInts(I a) {
  uint32_t sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += static_cast<uint32_t>(a.v[i]);
  return sum;
}
// Adds bit Part * kWidth + i of `word` to lane i.
template <int Part>
inline I AddBits(I a, uint32_t word) {
  I r;
  TFGRADCOMP_EACH(a.v[i] + ((word >> (Part * kWidth + i)) & 1));
}
// One bit a lane that is not 0.
inline uint32_t NonzeroBits(I a) {
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= uint32_t{a.v[i] != 0} << i;
  return bits;
}
// The eight bytes as 32-bit integers.
inline void StoreBytes(int32_t* p, uint64_t bytes) {
  for (int i = 0; i < 8; ++i) p[i] = static_cast<int32_t>(bytes >> (8 * i) & 0xFF);
}

inline D LoadDoubles(const double* p) {
  D r;
  TFGRADCOMP_EACH(p[i]);
}
inline D Widen(const float* p) {
  D r;
  TFGRADCOMP_EACH(double{p[i]});
}
inline D SetDoubles(double x) {
  D r;
  TFGRADCOMP_EACH(x);
}
inline D Add(D a, D b) {
  D r;
  TFGRADCOMP_EACH(a.v[i] + b.v[i]);
}
inline D Sub(D a, D b) {
  D r;
  TFGRADCOMP_EACH(a.v[i] - b.v[i]);
}
inline D Mul(D a, D b) {
  D r;
  TFGRADCOMP_EACH(a.v[i] * b.v[i]);
}
inline D Abs(D a) {
  D r;
  TFGRADCOMP_EACH(__builtin_fabs(a.v[i]));
}
inline D Floor(D a) {
  D r;
  TFGRADCOMP_EACH(__builtin_floor(a.v[i]));
}
// Lanes by halves: the last step of word_format.h's order.
inline double SumLanes(D a) {
  const double even = (a.v[0] + a.v[4]) + (a.v[2] + a.v[6]);
  const double odd = (a.v[1] + a.v[5]) + (a.v[3] + a.v[7]);
  return even + odd;
}
// Integers in [0, 2^32) as the bits of uint32.
inline void StoreAsInts(int32_t* p, D a) {
  for (int i = 0; i < 8; ++i) {
    p[i] = static_cast<int32_t>(static_cast<uint32_t>(static_cast<int64_t>(a.v[i])));
  }
}

// The words of Philox blocks [block, block + 8).
inline void Random32(RandomStream stream, uint64_t block, uint32_t words[32]) {
  for (int i = 0; i < 8; ++i) Philox(stream, block + i, words + 4 * i);
}

// As Uniform() of each word.
inline F Uniforms(const uint32_t* words) {
  F r;
  TFGRADCOMP_EACH(Uniform(words[i]));
}

#undef TFGRADCOMP_EACH
