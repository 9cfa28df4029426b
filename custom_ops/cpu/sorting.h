// Sorting of floats by the integers that have their order.

// Maps the bits of a number to a key. Keys, as integers, have the order of the numbers.
inline uint32_t KeyOf(uint32_t bits) {
  return bits ^ (bits >> 31 ? ~uint32_t{0} : uint32_t{1} << 31);
}
inline uint32_t BitsOfKey(uint32_t key) {
  return key ^ (key >> 31 ? uint32_t{1} << 31 : ~uint32_t{0});
}

// Up to this size, an insertion sort takes less time than the counters of a radix sort.
constexpr int64_t kInserted = 64;

void InsertionSort(uint32_t* keys, int64_t size) {
  for (int64_t i = 1; i < size; ++i) {
    const uint32_t key = keys[i];
    int64_t j = i;
    for (; j > 0 && keys[j - 1] > key; --j) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

// Sorts by one byte after the other, beginning with the lowest. Returns the buffer that
// holds the result: `keys` or `other`.
uint32_t* RadixSort(uint32_t* keys, uint32_t* other, int64_t size) {
  constexpr int kBytes = 4, kValues = 256;
  int64_t counts[kBytes][kValues] = {};
  for (int64_t i = 0; i < size; ++i) {
    for (int byte = 0; byte < kBytes; ++byte) ++counts[byte][keys[i] >> 8 * byte & 255];
  }
  for (int byte = 0; byte < kBytes; ++byte) {
    const int shift = 8 * byte;
    if (counts[byte][keys[0] >> shift & 255] == size) continue;
    // The keys of a value are written from its first place upwards and from its last
    // place downwards at once. The processor overlaps the two chains of dependent
    // counters, so that they take the time of one.
    int64_t first[kValues], end[kValues], total = 0;
    for (int value = 0; value < kValues; ++value) {
      first[value] = total;
      end[value] = total += counts[byte][value];
    }
    int64_t i = 0, j = size;
    for (; i + 1 < j; ++i) {
      const uint32_t low = keys[i], high = keys[--j];
      other[first[low >> shift & 255]++] = low;
      other[--end[high >> shift & 255]] = high;
    }
    if (i < j) other[first[keys[i] >> shift & 255]] = keys[i];
    uint32_t* const sorted = other;
    other = keys;
    keys = sorted;
  }
  return keys;
}
