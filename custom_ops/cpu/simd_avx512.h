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
inline void StorePairs(float* p, D low, D high) {
  const __m512i pairs =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  Store(p, _mm512_permutex2var_ps(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), pairs,
                                  _mm512_castps256_ps512(_mm512_cvtpd_ps(high))));
}

// As in simd_avx2.h, eight blocks at a time.
struct RoundKeys {
  explicit RoundKeys(RandomStream stream)
      : start(stream.first),
        high(_mm512_set1_epi64(static_cast<int64_t>(stream.high))) {
    uint32_t k0 = static_cast<uint32_t>(stream.key);
    uint32_t k1 = static_cast<uint32_t>(stream.key >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      first[round] = _mm512_set1_epi64(k0);
      second[round] = _mm512_set1_epi64(k1);
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
  }
  uint64_t start;  // The number of the stream's first block.
  __m512i high, first[kPhiloxRounds], second[kPhiloxRounds];
};

template <int Groups>
inline void RandomWords(const RoundKeys& keys, uint64_t block, uint32_t* words) {
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  constexpr int kXor3 = 0x96;
  __m512i c0[Groups], c1[Groups], c2[Groups], c3[Groups];
  for (int g = 0; g < Groups; ++g) {
    const __m512i first =
        _mm512_set1_epi64(static_cast<int64_t>(keys.start + block + 8 * g));
    c0[g] = _mm512_add_epi64(first, lanes);
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
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  for (int g = 0; g < Groups; ++g, words += 32) {
    const __m512i c01 =
        _mm512_mask_blend_epi32(0xAAAA, c0[g], _mm512_slli_epi64(c1[g], 32));
    const __m512i c23 =
        _mm512_mask_blend_epi32(0xAAAA, c2[g], _mm512_slli_epi64(c3[g], 32));
    _mm512_storeu_si512(words, _mm512_permutex2var_epi64(c01, low, c23));
    _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi64(c01, high, c23));
  }
}

inline F Uniforms(const uint32_t* words) {
  const I bits = _mm512_loadu_si512(words);
  return Mul(ToFloats(_mm512_srli_epi32(bits, 8)), Set(1.0f / (1 << 24)));
}
