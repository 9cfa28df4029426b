// The interface of simd_portable.h in AVX-512 (F, BW, DQ, VL).

constexpr int kWidth = 16;

using F = __m512;
using I = __m512i;
using D = __m512d;

inline F Load(const float* p) { return _mm512_loadu_ps(p); }
inline F Set(float x) { return _mm512_set1_ps(x); }
inline void Store(float* p, F a) { _mm512_storeu_ps(p, a); }
constexpr bool kStreams = true;
// In pieces, which are as fast: a part of a vector seldom begins at 64 bytes.
constexpr int kStreamAlignment = 16;
inline void Stream(float* p, F a) {
  _mm_stream_ps(p, _mm512_castps512_ps128(a));
  _mm_stream_ps(p + 4, _mm512_extractf32x4_ps(a, 1));
  _mm_stream_ps(p + 8, _mm512_extractf32x4_ps(a, 2));
  _mm_stream_ps(p + 12, _mm512_extractf32x4_ps(a, 3));
}
inline void Fence() { _mm_sfence(); }
inline F Add(F a, F b) { return _mm512_add_ps(a, b); }
inline F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F Div(F a, F b) { return _mm512_div_ps(a, b); }
inline F Sqrt(F a) { return _mm512_sqrt_ps(a); }
inline F Abs(F a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
inline F Min(F a, F b) { return _mm512_min_ps(a, b); }
inline F Max(F a, F b) { return _mm512_max_ps(a, b); }

inline uint32_t LessBits(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline uint32_t MinusBits(F a) { return _mm512_movepi32_mask(_mm512_castps_si512(a)); }
inline uint32_t ZeroBits(F a) {
  return _mm512_testn_epi32_mask(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF));
}
inline uint32_t NonfiniteBits(F a) {
  return _mm512_fpclass_ps_mask(a, 0x99);  // NaN (either kind) and the infinities.
}
template <int Part>
inline F Select(uint32_t word, F zero, F one) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(word >> (Part * kWidth)), zero,
                              one);
}

template <int Part>
inline F Negate(uint32_t word, F a) {
  return _mm512_mask_xor_ps(a, static_cast<__mmask16>(word >> (Part * kWidth)), a,
                            _mm512_set1_ps(-0.0f));
}

inline I LoadInts(const int32_t* p) { return _mm512_loadu_si512(p); }
inline I SetInts(int32_t x) { return _mm512_set1_epi32(x); }
inline void StoreInts(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
inline I And(I a, I b) { return _mm512_and_si512(a, b); }
inline I Or(I a, I b) { return _mm512_or_si512(a, b); }
inline I Xor(I a, I b) { return _mm512_xor_si512(a, b); }
inline I AndNot(I a, I b) { return _mm512_andnot_si512(b, a); }
inline I MaxInts(I a, I b) { return _mm512_max_epi32(a, b); }
inline I MinInts(I a, I b) { return _mm512_min_epi32(a, b); }
inline int32_t LargestLane(I a) { return _mm512_reduce_max_epi32(a); }
inline I MaxWhereLess(I a, I b, I x, I y) {
  return _mm512_mask_max_epi32(a, _mm512_cmplt_epi32_mask(x, y), a, b);
}
inline uint32_t LessBits(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
inline uint32_t AtMostBits(I a, I b) { return _mm512_cmple_epi32_mask(a, b); }
inline int CountBits(uint32_t bits) {
  // GCC 12 may store the 16 bits of a mask and load 32.
  asm("" : "+r"(bits));
  return __builtin_popcount(bits & 0xFFFF);
}
constexpr bool kCompresses = true;
inline void StoreWhere(int32_t* p, uint32_t bits, I a) {
  StoreInts(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), a));
}
inline I KeepWhere(uint32_t bits, I a) {
  return _mm512_maskz_mov_epi32(static_cast<__mmask16>(bits), a);
}
inline I KeysOf(I bits) {
  return _mm512_mask_sub_epi32(bits, _mm512_movepi32_mask(bits),
                               _mm512_set1_epi32(INT32_MIN), bits);
}
inline F NumbersOf(I keys) {
  constexpr int kOrAnd = 0xF8;  // a | (b & c)
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
      _mm512_abs_epi32(keys), keys, _mm512_set1_epi32(INT32_MIN), kOrAnd));
}
inline I RoundNormal(F a, F scale, F other) {
  const __mmask16 is_normal =
      _mm512_test_epi32_mask(_mm512_castps_si512(a), _mm512_set1_epi32(0x7F800000));
  return _mm512_maskz_cvtps_epi32(is_normal, Mul(Mul(a, scale), other));
}
inline I MagnitudeBits(F a) { return _mm512_castps_si512(Abs(a)); }
inline F ToFloats(I a) { return _mm512_cvtepi32_ps(a); }
inline I Truncate(F a) { return _mm512_cvttps_epi32(a); }
inline F Fraction(F a) {
  return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline F Pick(const float* p, I lanes) {
  return _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(p));
}
inline F PickOf16(const float* p, I lanes) { return Pick(p, lanes); }
inline F Gather(const float* p, I lanes) { return _mm512_i32gather_ps(lanes, p, 4); }
inline I AddInts(I a, I b) { return _mm512_add_epi32(a, b); }
inline I AddWhere(I a, __mmask16 lanes) {
  return _mm512_mask_add_epi32(a, lanes, a, _mm512_set1_epi32(1));
}
inline I AddLess(I a, F x, F y) {
  return AddWhere(a, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ));
}
inline I AddAtMost(I a, F x, F y) {
  return AddWhere(a, _mm512_cmp_ps_mask(x, y, _CMP_LE_OQ));
}
inline I AddLess(I a, I x, I y) { return AddWhere(a, _mm512_cmplt_epi32_mask(x, y)); }
inline I SubInts(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I ShiftRight(I a, int bits) {
  return _mm512_sra_epi32(a, _mm_cvtsi32_si128(bits));
}
inline void StoreBytes(int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
inline uint64_t EqualBytes(const int8_t* p, int8_t byte) {
  return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(byte));
}
inline I MulInts(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline __m128i AddFours(I a) {
  const __m256i eight =
      _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(eight),
                       _mm256_extracti128_si256(eight, 1));
}
inline uint32_t SumInts(I a) {
  __m128i sum = AddFours(a);
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(sum));
}
inline void SumFour(uint32_t* p, I a, I b, I c, I d) {
  const I ab = AddInts(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const I cd = AddInts(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const I abcd = AddInts(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), AddFours(abcd));
}
template <int Part>
inline I AddBits(I a, uint32_t word) {
  return _mm512_mask_add_epi32(a, static_cast<__mmask16>(word >> (Part * kWidth)), a,
                               _mm512_set1_epi32(1));
}
inline uint32_t NonzeroBits(I a) { return _mm512_test_epi32_mask(a, a); }
inline D Widen(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline D WidenWords(const uint32_t* p) {
  return _mm512_cvtepu32_pd(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline D WidenRow(const F* group, int row) {
  const F vector = group[row / 2];
  return _mm512_cvtps_pd(row % 2 == 0 ? _mm512_castps512_ps256(vector)
                                      : _mm512_extractf32x8_ps(vector, 1));
}
inline D AddWide(D sum, I a) {
  sum = _mm512_add_pd(sum, _mm512_cvtepi32_pd(_mm512_castsi512_si256(a)));
  return _mm512_add_pd(sum, _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(a, 1)));
}
inline D LoadDoubles(const double* p) { return _mm512_loadu_pd(p); }
inline void StoreDoubles(double* p, D a) { _mm512_storeu_pd(p, a); }
inline D SetDoubles(double x) { return _mm512_set1_pd(x); }
inline D Add(D a, D b) { return _mm512_add_pd(a, b); }
inline D Sub(D a, D b) { return _mm512_sub_pd(a, b); }
inline D Mul(D a, D b) { return _mm512_mul_pd(a, b); }
inline D Abs(D a) { return _mm512_andnot_pd(_mm512_set1_pd(-0.0), a); }
inline D Floor(D a) {
  return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline double SumLanes(D a) {
  const __m256d four =
      _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
  const __m128d two =
      _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
inline void SumLanes(float* p, const F* v) {
  // Halves of two vectors, then quarters of four, and so on.
  const auto halves = [&](int i) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x44),
                         _mm512_shuffle_f32x4(v[i], v[i + 4], 0xEE));
  };
  const auto quarters = [&](int i) {
    const F a = halves(i), b = halves(i + 8);
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88),
                         _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  const auto eighths = [&](int i) {
    const F a = quarters(i), b = quarters(i + 1);
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  };
  const F a = eighths(0), b = eighths(2);
  _mm512_storeu_ps(
      p, _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD)));
}
inline void StorePairs(float* p, D low, D high) {
  const __m512i pairs =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  Store(p, _mm512_permutex2var_ps(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), pairs,
                                  _mm512_castps256_ps512(_mm512_cvtpd_ps(high))));
}

// As in simd_avx2.h, eight blocks at a time.
struct RoundKeys {
  explicit RoundKeys(RandomStream stream)
      : high(_mm512_set1_epi64(static_cast<int64_t>(stream.high))) {
    uint32_t k0 = static_cast<uint32_t>(stream.key);
    uint32_t k1 = static_cast<uint32_t>(stream.key >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      first[round] = _mm512_set1_epi64(k0);
      second[round] = _mm512_set1_epi64(k1);
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
  }
  __m512i high, first[kPhiloxRounds], second[kPhiloxRounds];
};

template <int Groups>
inline void PhiloxGroups(const RoundKeys& keys, const __m512i (&blocks)[Groups],
                         uint32_t* words) {
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  constexpr int kXor3 = 0x96;
  __m512i c0[Groups], c1[Groups], c2[Groups], c3[Groups];
  for (int g = 0; g < Groups; ++g) {
    c0[g] = blocks[g];
    c1[g] = _mm512_srli_epi64(c0[g], 32);
    c2[g] = keys.high;
    c3[g] = _mm512_srli_epi64(keys.high, 32);
  }
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int g = 0; g < Groups; ++g) {
      const __m512i p0 = _mm512_mul_epu32(c0[g], m0), p1 = _mm512_mul_epu32(c2[g], m1);
      c0[g] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1[g],
                                        keys.first[round], kXor3);
      c2[g] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3[g],
                                        keys.second[round], kXor3);
      c1[g] = p1;
      c3[g] = p0;
    }
  }
  for (int g = 0; g < Groups; ++g, words += 32) {
    const __m512i c01 =
        _mm512_mask_blend_epi32(0xAAAA, c0[g], _mm512_slli_epi64(c1[g], 32));
    const __m512i c23 =
        _mm512_mask_blend_epi32(0xAAAA, c2[g], _mm512_slli_epi64(c3[g], 32));
    _mm512_storeu_si512(words, _mm512_unpacklo_epi64(c01, c23));
    _mm512_storeu_si512(words + 16, _mm512_unpackhi_epi64(c01, c23));
  }
}

template <int Groups>
inline void RandomWords(const RoundKeys& keys, uint64_t block, uint32_t* words) {
  // With this order of blocks the words come out in order.
  const __m512i lanes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  __m512i blocks[Groups];
  for (int g = 0; g < Groups; ++g) {
    const __m512i first = _mm512_set1_epi64(static_cast<int64_t>(block + 8 * g));
    blocks[g] = _mm512_add_epi64(first, lanes);
  }
  PhiloxGroups<Groups>(keys, blocks, words);
}

inline void RandomWordsOf(const RoundKeys& keys, const uint64_t (&blocks)[8],
                          uint32_t* words) {
  const __m512i lanes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  PhiloxGroups<1>(keys, {_mm512_permutexvar_epi64(lanes, _mm512_loadu_si512(blocks))},
                  words);
}

template <int Bits>
inline I WidenBytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), Bits);
}

inline F Uniforms(const uint8_t* upper, const uint16_t* lower) {
  const I low = _mm512_cvtepu16_epi32(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower)));
  return Mul(ToFloats(Or(WidenBytes<16>(upper), low)), Set(1.0f / (1 << 24)));
}

using Kept = __mmask64;
inline uint64_t KeptBits(Kept kept) { return kept; }

inline Kept Decide(const F (&thresholds)[4], const uint8_t* upper,
                   uint64_t* undecided) {
  const auto pack = [&](int i) {
    return _mm512_packus_epi32(_mm512_cvtps_epi32(thresholds[i]),
                               _mm512_cvtps_epi32(thresholds[i + 1]));
  };
  const auto bytes = [](__m512i a, __m512i b) {
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(
        order, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
  };
  const __m512i one = _mm512_set1_epi16(1), a = pack(0), b = pack(2);
  const __m512i low = bytes(_mm512_subs_epu16(a, one), _mm512_subs_epu16(b, one));
  const __m512i high = bytes(a, b), drawn = _mm512_loadu_si512(upper);
  const __mmask64 above = _mm512_cmpge_epu8_mask(drawn, low);
  *undecided = _mm512_mask_cmple_epu8_mask(above, drawn, high);
  return ~above;
}

inline void TernaryQuads(const F (&x)[4], Kept kept, uint8_t* quads) {
  uint64_t negative = 0;
  for (int i = 0; i < 4; ++i) negative |= uint64_t{MinusBits(x[i])} << (16 * i);
  const __m512i one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2);
  const __m512i codes = _mm512_maskz_mov_epi8(
      ~(kept & negative), _mm512_mask_mov_epi8(one, kept & ~negative, two));
  const __m512i pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x0301));
  const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00090001));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(quads), _mm512_cvtepi32_epi8(fours));
}

inline void PackQuads(const uint8_t* quads, uint32_t* words) {
  // Two words' bytes to each 128 bits, and five of each to 64.
  const __m512i apart = _mm512_setr_epi32(
      0x00010000, 0x00030002, 0x00050004, 0x00070006, 0x00060005, 0x00080007,
      0x000A0009, 0x000C000B, 0x000B000A, 0x000D000C, 0x000F000E, 0x00110010,
      0x0010000F, 0x00120011, 0x00140013, 0x00160015);
  const __m512i fives = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, 8, 9, -1, -1, -1));
  const __m512i bytes = _mm512_shuffle_epi8(
      _mm512_permutexvar_epi16(apart, _mm512_loadu_si512(quads)), fives);
  const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x5101));
  const __m512i fours =
      _mm512_madd_epi16(pairs, _mm512_set1_epi64(0x0000'0001'19A1'0001));
  const __m512i last =
      _mm512_mul_epu32(_mm512_srli_epi64(fours, 32), _mm512_set1_epi64(43046721));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words),
                      _mm512_cvtepi64_epi32(_mm512_add_epi32(fours, last)));
}
