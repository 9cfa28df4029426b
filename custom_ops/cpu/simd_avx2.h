// The interface of simd_portable.h in AVX2.

constexpr int kWidth = 8;

using F = __m256;
using I = __m256i;
struct D {
  __m256d low, high;
};

inline F Load(const float* p) { return _mm256_loadu_ps(p); }
inline F Set(float x) { return _mm256_set1_ps(x); }
inline void Store(float* p, F a) { _mm256_storeu_ps(p, a); }
constexpr bool kStreams = true;
constexpr int kStreamAlignment = 32;
inline void Stream(float* p, F a) { _mm256_stream_ps(p, a); }
inline void Fence() { _mm_sfence(); }
inline F Add(F a, F b) { return _mm256_add_ps(a, b); }
inline F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F Div(F a, F b) { return _mm256_div_ps(a, b); }
inline F Sqrt(F a) { return _mm256_sqrt_ps(a); }
inline F Abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F Min(F a, F b) { return _mm256_min_ps(a, b); }
inline F Max(F a, F b) { return _mm256_max_ps(a, b); }

inline uint32_t LessBits(F a, F b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
inline uint32_t MinusBits(F a) { return static_cast<uint32_t>(_mm256_movemask_ps(a)); }
inline uint32_t ZeroBits(F a) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(a), 1);
  return static_cast<uint32_t>(_mm256_movemask_ps(
      _mm256_castsi256_ps(_mm256_cmpeq_epi32(shifted, _mm256_setzero_si256()))));
}
inline uint32_t NonfiniteBits(F a) {
  const F infinity = _mm256_set1_ps(__builtin_inff());
  return static_cast<uint32_t>(
      _mm256_movemask_ps(_mm256_cmp_ps(Abs(a), infinity, _CMP_NLT_UQ)));
}
// The bits of a part of a word, each in the highest bit of its lane.
template <int Part>
inline __m256i BitsOnTop(uint32_t word) {
  constexpr int kTop = 31 - Part * kWidth;
  const __m256i shifts = _mm256_setr_epi32(kTop, kTop - 1, kTop - 2, kTop - 3, kTop - 4,
                                           kTop - 5, kTop - 6, kTop - 7);
  return _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(word)), shifts);
}
template <int Part>
inline F Select(uint32_t word, F zero, F one) {
  return _mm256_blendv_ps(zero, one, _mm256_castsi256_ps(BitsOnTop<Part>(word)));
}

template <int Part>
inline F Negate(uint32_t word, F a) {
  const __m256i sign = _mm256_set1_epi32(INT32_MIN);
  return _mm256_xor_ps(
      a, _mm256_castsi256_ps(_mm256_and_si256(BitsOnTop<Part>(word), sign)));
}

inline I LoadInts(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline I SetInts(int32_t x) { return _mm256_set1_epi32(x); }
inline void StoreInts(int32_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
}
inline I And(I a, I b) { return _mm256_and_si256(a, b); }
inline I Or(I a, I b) { return _mm256_or_si256(a, b); }
inline I Xor(I a, I b) { return _mm256_xor_si256(a, b); }
inline I AndNot(I a, I b) { return _mm256_andnot_si256(b, a); }
inline I MaxInts(I a, I b) { return _mm256_max_epi32(a, b); }
inline I MinInts(I a, I b) { return _mm256_min_epi32(a, b); }
inline int32_t LargestLane(I a) {
  __m128i most =
      _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
  return _mm_cvtsi128_si32(most);
}
inline I MaxWhereLess(I a, I b, I x, I y) {
  return _mm256_blendv_epi8(a, MaxInts(a, b), _mm256_cmpgt_epi32(y, x));
}
inline uint32_t LessBits(I a, I b) {
  return static_cast<uint32_t>(
      _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a))));
}
inline uint32_t AtMostBits(I a, I b) { return LessBits(b, a) ^ 0xFF; }
inline int CountBits(uint32_t bits) { return __builtin_popcount(bits); }
// For each number of eight bits, the places of its ones.
struct PlacesOfOnes {
  uint8_t places[256][8];

  constexpr PlacesOfOnes() : places() {
    for (int bits = 0; bits < 256; ++bits) {
      for (int i = 0, count = 0; i < 8; ++i) {
        if (bits >> i & 1) places[bits][count++] = static_cast<uint8_t>(i);
      }
    }
  }
};
constexpr PlacesOfOnes kPlacesOfOnes;
constexpr bool kCompresses = true;
inline void StoreWhere(int32_t* p, uint32_t bits, I a) {
  const __m128i places =
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlacesOfOnes.places[bits]));
  StoreInts(p, _mm256_permutevar8x32_epi32(a, _mm256_cvtepu8_epi32(places)));
}
inline I KeepWhere(uint32_t bits, I a) {
  return _mm256_and_si256(a, _mm256_srai_epi32(BitsOnTop<0>(bits), 31));
}
inline I KeysOf(I bits) {
  const I sign = _mm256_srai_epi32(bits, 31);
  const I magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  return _mm256_sub_epi32(_mm256_xor_si256(magnitude, sign), sign);
}
inline F NumbersOf(I keys) {
  const I sign = _mm256_and_si256(keys, _mm256_set1_epi32(INT32_MIN));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_abs_epi32(keys), sign));
}
inline I RoundNormal(F a, F scale, F other) {
  const I exponent =
      _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7F800000));
  const I is_denormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  return _mm256_andnot_si256(is_denormal,
                             _mm256_cvtps_epi32(Mul(Mul(a, scale), other)));
}
inline I MagnitudeBits(F a) { return _mm256_castps_si256(Abs(a)); }
inline F ToFloats(I a) { return _mm256_cvtepi32_ps(a); }
inline I Truncate(F a) { return _mm256_cvttps_epi32(a); }
inline F Fraction(F a) { return Sub(a, _mm256_floor_ps(a)); }
inline F Pick(const float* p, I lanes) {
  return _mm256_permutevar8x32_ps(_mm256_loadu_ps(p), lanes);
}
inline F PickOf16(const float* p, I lanes) {
  const F of_upper = _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28));
  return _mm256_blendv_ps(Pick(p, lanes), Pick(p + 8, lanes), of_upper);
}
inline F Gather(const float* p, I lanes) { return _mm256_i32gather_ps(p, lanes, 4); }
inline I AddInts(I a, I b) { return _mm256_add_epi32(a, b); }
inline I AddLess(I a, F x, F y) {
  return _mm256_sub_epi32(a, _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_LT_OQ)));
}
inline I AddAtMost(I a, F x, F y) {
  return _mm256_sub_epi32(a, _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_LE_OQ)));
}
inline I AddLess(I a, I x, I y) {
  return _mm256_sub_epi32(a, _mm256_cmpgt_epi32(y, x));
}
inline I SubInts(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I ShiftRight(I a, int bits) {
  return _mm256_sra_epi32(a, _mm_cvtsi32_si128(bits));
}
inline void StoreBytes(int8_t* p, I a) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline uint64_t EqualBytes(const int8_t* p, int8_t byte) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(byte))));
}
inline I MulInts(I a, I b) { return _mm256_mullo_epi32(a, b); }
inline __m128i AddFours(I a) {
  return _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
inline uint32_t SumInts(I a) {
  __m128i sum = AddFours(a);
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(sum));
}
inline void SumFour(uint32_t* p, I a, I b, I c, I d) {
  const I abcd = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), AddFours(abcd));
}
template <int Part>
inline I AddBits(I a, uint32_t word) {
  return _mm256_add_epi32(a, _mm256_srli_epi32(BitsOnTop<Part>(word), 31));
}
inline uint32_t NonzeroBits(I a) {
  const __m256i zero = _mm256_cmpeq_epi32(a, _mm256_setzero_si256());
  return ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zero))) & 0xFF;
}

inline D Widen(const float* p) {
  return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
}
inline __m256d WidenFour(__m128i words) {
  // 2^52 + n holds the integer n in its low bits.
  const __m256d magic = _mm256_set1_pd(4503599627370496.0);
  const __m256i wide = _mm256_cvtepu32_epi64(words);
  return _mm256_sub_pd(_mm256_or_pd(_mm256_castsi256_pd(wide), magic), magic);
}
inline D WidenWords(const uint32_t* p) {
  const __m128i* words = reinterpret_cast<const __m128i*>(p);
  return {WidenFour(_mm_loadu_si128(words)), WidenFour(_mm_loadu_si128(words + 1))};
}
inline D WidenRow(const F* group, int row) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(group[row])),
          _mm256_cvtps_pd(_mm256_extractf128_ps(group[row], 1))};
}
inline D AddWide(D sum, I a) {
  return {_mm256_add_pd(sum.low, _mm256_cvtepi32_pd(_mm256_castsi256_si128(a))),
          _mm256_add_pd(sum.high, _mm256_cvtepi32_pd(_mm256_extracti128_si256(a, 1)))};
}
inline D LoadDoubles(const double* p) {
  return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)};
}
inline void StoreDoubles(double* p, D a) {
  _mm256_storeu_pd(p, a.low);
  _mm256_storeu_pd(p + 4, a.high);
}
inline D SetDoubles(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline D Add(D a, D b) {
  return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
}
inline D Sub(D a, D b) {
  return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)};
}
inline D Mul(D a, D b) {
  return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)};
}
inline D Abs(D a) {
  const __m256d sign = _mm256_set1_pd(-0.0);
  return {_mm256_andnot_pd(sign, a.low), _mm256_andnot_pd(sign, a.high)};
}
inline D Floor(D a) { return {_mm256_floor_pd(a.low), _mm256_floor_pd(a.high)}; }
inline double SumLanes(D a) {
  const __m256d four = _mm256_add_pd(a.low, a.high);
  const __m128d two =
      _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
inline void SumLanes(float* p, const F* v) {
  // Halves of two vectors, then quarters of four, then eighths of eight.
  const auto halves = [&](int i) {
    return _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                         _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
  };
  const auto quarters = [&](int i) {
    const F a = halves(i), b = halves(i + 1);
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
  };
  const F a = quarters(0), b = quarters(2);
  _mm256_storeu_ps(
      p, _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)));
}
inline void StorePairs(float* p, D low, D high) {
  const __m128 low0 = _mm256_cvtpd_ps(low.low), low4 = _mm256_cvtpd_ps(low.high);
  const __m128 high0 = _mm256_cvtpd_ps(high.low), high4 = _mm256_cvtpd_ps(high.high);
  _mm_storeu_ps(p, _mm_unpacklo_ps(low0, high0));
  _mm_storeu_ps(p + 4, _mm_unpackhi_ps(low0, high0));
  _mm_storeu_ps(p + 8, _mm_unpacklo_ps(low4, high4));
  _mm_storeu_ps(p + 12, _mm_unpackhi_ps(low4, high4));
}

// The keys of Philox' rounds, which all blocks share.
struct RoundKeys {
  explicit RoundKeys(RandomStream stream)
      : high(_mm256_set1_epi64x(static_cast<int64_t>(stream.high))) {
    uint32_t k0 = static_cast<uint32_t>(stream.key);
    uint32_t k1 = static_cast<uint32_t>(stream.key >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      first[round] = _mm256_set1_epi64x(k0);
      second[round] = _mm256_set1_epi64x(k1);
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
  }
  __m256i high, first[kPhiloxRounds], second[kPhiloxRounds];
};

// Four blocks of Philox per chain, a block in each 64-bit lane. Only the low halves of
// the lanes matter, because multiplication reads no other bits. Chains hide each
// other's latency.
template <int Chains>
inline void PhiloxChains(const RoundKeys& keys, const __m256i (&blocks)[Chains],
                         uint32_t* words) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxM0), m1 = _mm256_set1_epi64x(kPhiloxM1);
  __m256i c0[Chains], c1[Chains], c2[Chains], c3[Chains];
  for (int i = 0; i < Chains; ++i) {
    c0[i] = blocks[i];
    c1[i] = _mm256_srli_epi64(c0[i], 32);
    c2[i] = keys.high;
    c3[i] = _mm256_srli_epi64(keys.high, 32);
  }
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int i = 0; i < Chains; ++i) {
      const __m256i p0 = _mm256_mul_epu32(c0[i], m0), p1 = _mm256_mul_epu32(c2[i], m1);
      c0[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1[i]),
                               keys.first[round]);
      c2[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3[i]),
                               keys.second[round]);
      c1[i] = p1;
      c3[i] = p0;
    }
  }
  for (int i = 0; i < Chains; ++i) {
    const __m256i c01 = _mm256_blend_epi32(c0[i], _mm256_slli_epi64(c1[i], 32), 0xAA);
    const __m256i c23 = _mm256_blend_epi32(c2[i], _mm256_slli_epi64(c3[i], 32), 0xAA);
    __m256i* out = reinterpret_cast<__m256i*>(words) + 2 * i;
    _mm256_storeu_si256(out, _mm256_unpacklo_epi64(c01, c23));
    _mm256_storeu_si256(out + 1, _mm256_unpackhi_epi64(c01, c23));
  }
}

template <int Groups>
inline void RandomWords(const RoundKeys& keys, uint64_t block, uint32_t* words) {
  // With this order of blocks the words come out in order.
  const __m256i lanes = _mm256_setr_epi64x(0, 2, 1, 3);
  constexpr int kTogether = Groups < 2 ? 2 : 4;
  for (int chain = 0; chain < 2 * Groups; chain += kTogether) {
    __m256i blocks[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      const uint64_t first = block + 4 * (chain + i);
      blocks[i] =
          _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first)), lanes);
    }
    PhiloxChains<kTogether>(keys, blocks, words + 16 * chain);
  }
}

inline void RandomWordsOf(const RoundKeys& keys, const uint64_t (&blocks)[8],
                          uint32_t* words) {
  const auto four = [&](int i) {
    return _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(blocks + i)), 0xD8);
  };
  PhiloxChains<2>(keys, {four(0), four(4)}, words);
}

template <int Bits>
inline I WidenBytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), Bits);
}

inline F Uniforms(const uint8_t* upper, const uint16_t* lower) {
  const I low =
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lower)));
  return Mul(ToFloats(Or(WidenBytes<16>(upper), low)), Set(1.0f / (1 << 24)));
}

using Kept = __m256i;  // Bytes of ones.
inline uint64_t KeptBits(Kept kept) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(kept));
}

// Restores the order after two packs, which work on 128-bit halves.
inline __m256i InOrder(__m256i packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline Kept Decide(const F (&thresholds)[4], const uint8_t* upper,
                   uint64_t* undecided) {
  const auto pack = [&](int i) {
    return _mm256_packus_epi32(_mm256_cvtps_epi32(thresholds[i]),
                               _mm256_cvtps_epi32(thresholds[i + 1]));
  };
  const auto bytes = [](__m256i a, __m256i b) {
    return InOrder(
        _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)));
  };
  const __m256i one = _mm256_set1_epi16(1), a = pack(0), b = pack(2);
  const __m256i low = bytes(_mm256_subs_epu16(a, one), _mm256_subs_epu16(b, one));
  const __m256i high = bytes(a, b);
  const __m256i drawn = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper));
  const __m256i larger = _mm256_max_epu8(drawn, low);
  const __m256i between = _mm256_cmpeq_epi8(_mm256_min_epu8(larger, high), drawn);
  *undecided = static_cast<uint32_t>(_mm256_movemask_epi8(between));
  return _mm256_xor_si256(_mm256_cmpeq_epi8(larger, drawn), _mm256_set1_epi8(-1));
}

inline void TernaryQuads(const F (&x)[4], Kept kept, uint8_t* quads) {
  const auto pack = [&](int i) {
    return _mm256_packs_epi32(_mm256_castps_si256(x[i]), _mm256_castps_si256(x[i + 1]));
  };
  const __m256i one = _mm256_set1_epi8(1);
  const __m256i signs =
      _mm256_or_si256(InOrder(_mm256_packs_epi16(pack(0), pack(2))), one);
  const __m256i codes =
      _mm256_add_epi8(one, _mm256_sign_epi8(_mm256_and_si256(kept, one), signs));
  const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0301));
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00090001));
  const __m128i eight = _mm_packs_epi32(_mm256_castsi256_si128(fours),
                                        _mm256_extracti128_si256(fours, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(quads), _mm_packus_epi16(eight, eight));
}

inline void PackQuads(const uint8_t* quads, uint32_t* words) {
  // Two words' bytes to each 128 bits, and five of each to 64.
  const __m256i fives = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, 8, 9, -1, -1, -1));
  for (int i = 0; i < 2; ++i, quads += 20, words += 4) {
    const __m256i bytes = _mm256_shuffle_epi8(
        _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(quads + 10),
                            reinterpret_cast<const __m128i*>(quads)),
        fives);
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x5101));
    const __m256i fours =
        _mm256_madd_epi16(pairs, _mm256_set1_epi64x(0x0000'0001'19A1'0001));
    const __m256i last =
        _mm256_mul_epu32(_mm256_srli_epi64(fours, 32), _mm256_set1_epi64x(43046721));
    const __m256i sum = _mm256_permutevar8x32_epi32(
        _mm256_add_epi32(fours, last), _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm256_castsi256_si128(sum));
  }
}
