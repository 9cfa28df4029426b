// Numbers of a block as integers, whose sums are exact in any order. `top` is the
// exponent field of the block's largest magnitude, which gets 30 bits.

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;

inline double PowerOfTwo(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline double FixedScale(int top) { return PowerOfTwo(156 - top); }

// The integer of the number with these bits, as int32; 0 for a denormal.
inline __attribute__((always_inline)) uint32_t FixedPoint(uint32_t bits, double scale) {
  // The sum 1.5 * 2^52 + n is rounded to a number whose low bits are the integer n.
  const double shifted =
      static_cast<double>(FloatOf(bits & kInfinity ? bits : 0)) * scale +
      6755399441055744.0;
  uint64_t fixed;
  memcpy(&fixed, &shifted, sizeof(fixed));
  return static_cast<uint32_t>(fixed);
}

// The mean of `count` numbers whose integers have the sum `total`.
inline float MeanOfFixed(int64_t total, int64_t count, int top) {
  const double mean =
      static_cast<double>(total) / static_cast<double>(count) * PowerOfTwo(top - 156);
  const double smallest = PowerOfTwo(-126);
  return mean < smallest && mean > -smallest ? 0 : static_cast<float>(mean);
}
