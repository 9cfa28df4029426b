// Hands the CPU kernels words that nobody has packed: what a faulty network, or a
// hostile one, may deliver. Built with sanitizers, and with buffers of exactly the
// stated size, so that an access outside of one ends the program. Each result is
// compared with a plain loop over the elements: any words are a number, and the same
// one for every instruction set.
//
//   fuzz avx512 1000000 7     instruction set, messages for each decoder, seed
//
// A message is the words of one worker: random bits, words that were packed with a few
// bits changed, or words at the limits.
//
// Ends with 0: as expected, 1: not, 77: this machine has not got the instruction set.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../custom_ops/chunks.h"
#include "../../custom_ops/cpu/cpu.h"
#include "../../custom_ops/word_format.h"
#include "kernel_cases/array.h"

namespace {

using namespace tfgradcomp;         // NOLINT: the kernels are the subject here.
using namespace tfgradcomp_format;  // NOLINT
using tfgradcomp_cases::Array;

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : state_(seed) {}

  // Runs decoders on new messages; returns their number.
  template <typename Decoder>
  int64_t Run(const Decoder& decoder) {
    NewShape();
    decoder();
    return workers_;
  }

  void Unpack() {
    const uint64_t base = AnyBase();
    const Array<uint32_t> words = Words(base, workers_);
    Array<int32_t> codes(workers_ * size_);
    Call(UnpackCodes{words.data(), workers_, size_, base, codes.data()});
    for (int64_t i = 0; i < workers_; ++i) {
      for (int64_t j = 0; j < size_; ++j) {
        const auto code = static_cast<uint32_t>(codes[i * size_ + j]);
        Expect(code == Digit(words, base, i, j));
      }
    }
  }

  void Sum() {
    const uint64_t base = SumBase();
    const uint64_t least = workers_ * (base - 1) + 1;
    const uint64_t sum_base = least + Below(3) * Below(1000);
    const Array<uint32_t> words = Words(base, workers_);
    Array<uint32_t> sum(WordsFor(size_, sum_base));
    Call(SumCodes{words.data(), workers_, size_, base, sum_base, sum.data()});
    const int digits = DigitsPerWord(sum_base);
    for (int64_t word = 0; word < sum.count(); ++word) {
      uint64_t packed = 0;
      const int64_t first = word * digits;
      for (int64_t j = std::min(size_, first + digits) - 1; j >= first; --j) {
        packed = packed * sum_base + Total(words, base, j);
      }
      Expect(sum[word] == static_cast<uint32_t>(packed));
    }
  }

  void Levels() {
    const uint64_t base = SumBase();
    const int64_t step = 1 + Below(2), zero = Below(1000) - int64_t{500};
    const Array<uint32_t> words = Words(base, workers_);
    const Array<float> scale = Floats(blocks_);
    Array<float> values(size_);
    Call(SumLevels{words.data(), workers_, size_, base, step, zero, scale.data(),
                   splits_.data(), blocks_, values.data()});
    ForEachElement([&](int64_t j, int64_t b) {
      const int64_t level = step * static_cast<int64_t>(Total(words, base, j)) - zero;
      return Same(values[j], scale.data()[b] * static_cast<float>(level));
    });
  }

  void Signs() {
    const Array<uint32_t> words = Words(2, workers_);
    const Array<float> scale = Floats(workers_ * blocks_);
    Array<float> values(size_);
    Call(MeanOfSigns{words.data(), scale.data(), workers_, size_, splits_.data(),
                     blocks_, values.data()});
    ForEachElement([&](int64_t j, int64_t b) {
      return Same(values[j], MeanSign(words, scale, j, b));
    });
  }

  void Tables() {
    const int64_t counts[] = {2, 3, 5, 9, 15, 16, 17, 33, 100, 255, 257};
    const int64_t count = counts[Below(11)];
    const Array<uint32_t> words = Words(count, workers_);
    const Array<float> levels = Floats(workers_ * blocks_ * count);
    Array<float> values(size_);
    Call(MeanOfLevels{words.data(), levels.data(), workers_, size_, count,
                      splits_.data(), blocks_, values.data()});
    ForEachElement([&](int64_t j, int64_t b) {
      float sum = 0;
      for (int64_t i = 0; i < workers_; ++i) {
        const uint32_t code = Digit(words, count, i, j);
        const float level = levels.data()[(i * blocks_ + b) * count + code];
        sum = i == 0 ? level : sum + level;
      }
      return Same(values[j], sum / static_cast<float>(workers_));
    });
  }

  void Votes() {
    const int64_t base = 2 + Below(2), reply_base = 2 + Below(2);
    const int64_t quorum = Below(2) * Below(4);
    const Array<uint32_t> words = Words(base, workers_);
    Array<uint64_t> stream(3);
    for (int i = 0; i < 3; ++i) stream[i] = uint64_t{Next()} << 32 | Next();
    const bool draws = Below(2) != 0;
    Array<uint32_t> votes(WordsFor(size_, reply_base));
    Call(MajorityVote{words.data(), workers_, size_, base, reply_base, quorum,
                      draws ? stream.data() : nullptr, votes.data()});
    for (int64_t j = 0; j < size_; ++j) {
      const auto total = static_cast<int64_t>(Total(words, base, j));
      const int64_t net = (base == 2 ? 2 * total : total) - workers_;
      int64_t vote = (net > 0) - (net < 0);
      const RandomStream random{stream[0], stream[1], stream[2]};
      uint32_t coins[4];
      Philox(random, random.CoinBlock(j), coins);
      if (net == 0 && draws) vote = (coins[j % 128 / 32] >> j % 32 & 1) ? 1 : -1;
      if (reply_base == 3 && std::abs(net) < quorum) vote = 0;
      const int64_t code = reply_base == 3 ? vote + 1 : vote > 0;
      const uint64_t found =
          Quotient(votes[j / DigitsPerWord(reply_base)], reply_base, j) % reply_base;
      Expect(static_cast<int64_t>(found) == code);
    }
  }

  // What a server decodes while it keeps a residual.
  void Residuals() {
    const Array<uint32_t> sent = Words(2, workers_), words = Words(2, 1);
    const Array<float> sent_scale = Floats(workers_ * blocks_);
    const Array<float> scale = Floats(blocks_), residual = Floats(size_);
    Array<float> ratio(1);
    Array<bool> moving(1);
    ratio[0] = 0.75f;
    moving[0] = Below(4) > 0;
    const int64_t slots = SlotsFor(size_, blocks_);
    Array<double> scratch(slots);
    Array<float> left(size_), new_scale(blocks_);
    Array<uint32_t> new_words(WordsFor(size_, 2));
    const auto p = [&](int64_t j, int64_t b) {
      return MeanSign(sent, sent_scale, j, b) + ratio[0] * residual.data()[j];
    };
    const auto check = [&](const uint32_t* signs, const float* by) {
      ForEachElement([&](int64_t j, int64_t b) {
        const float one = (signs[j / 32] >> j % 32 & 1) ? by[b] : -by[b];
        return Same(left[j], moving[0] ? p(j, b) - one : residual.data()[j]);
      });
    };
    const auto check_signs = [&] {
      ForEachElement([&](int64_t j, int64_t b) {
        const float value = p(j, b);
        if (value != value) return true;  // A NaN's sign is the processor's own.
        return (new_words[j / 32] >> j % 32 & 1) == SignCode(value);
      });
    };
    Call(MeanSignResidual{sent.data(), sent_scale.data(), workers_, residual.data(),
                          size_, ratio.data(), moving.data(), words.data(),
                          scale.data(), splits_.data(), blocks_, left.data()});
    check(words.data(), scale.data());
    Array<double> l1(blocks_);
    Call(MeanSignSums{sent.data(), sent_scale.data(), workers_, residual.data(), size_,
                      ratio.data(), splits_.data(), blocks_, scratch.data(), l1.data(),
                      new_words.data()});
    check_signs();
    Call(MeanSignErrorFeedback{sent.data(), sent_scale.data(), workers_,
                               residual.data(), size_, ratio.data(), moving.data(),
                               splits_.data(), blocks_, scratch.data(), left.data(),
                               new_scale.data(), new_words.data()});
    check_signs();
    check(new_words.data(), new_scale.data());
  }

  // In order, as the op demands; what is not is tried too, but has no result.
  void Sparse() {
    const int64_t row = Below(40);
    const bool in_order = Below(4) > 0;
    Array<uint32_t> words(workers_ * row);
    for (int64_t i = 0; i < workers_; ++i) {
      int64_t j = -1;
      for (int64_t at = 0; at < row; ++at) {
        uint32_t& word = words[i * row + at];
        j += 1 + Below(1 + Below(20));
        word = (Next() & ~kIndexMask) | static_cast<uint32_t>(j);
        if (j >= size_ && Below(2) != 0) word = Next() | kIndexMask;
        if (!in_order && Below(4) == 0) word = Extreme();
      }
    }
    const Array<float> scale = Floats(workers_ * blocks_);
    Array<float> values(size_);
    Call(MeanOfSparse{words.data(), row, scale.data(), workers_, size_, splits_.data(),
                      blocks_, values.data()});
    if (!in_order) return;
    ForEachElement([&](int64_t j, int64_t b) {
      float sum = 0;
      for (int64_t i = 0; i < workers_; ++i) {
        for (int64_t at = 0; at < row; ++at) {
          const uint32_t word = words[i * row + at];
          if (IndexOf(word) != j) continue;
          sum += scale.data()[i * blocks_ + b] * FactorOf(word);
        }
      }
      return Same(values[j], sum / static_cast<float>(workers_));
    });
  }

  void Largest() {
    const int64_t k = 1 + Below(Below(2) ? 8 : 70), bits = 1 + Below(3);
    const int64_t chunk = k + Below(200);
    const ChunkFormat format(k, chunk, bits);
    std::vector<int64_t> splits = {0};
    while (splits.back() < size_) {
      const auto width = 1 + Below(static_cast<uint32_t>(chunk));
      splits.push_back(std::min(size_, splits.back() + width));
    }
    blocks_ = static_cast<int64_t>(splits.size()) - 1;
    splits_ = Array<int64_t>(blocks_ + 1);
    std::copy(splits.begin(), splits.end(), splits_.data());
    Array<uint32_t> words(workers_ * blocks_ * format.words);
    const uint32_t kind = Below(3);
    for (int64_t i = 0; i < words.count(); ++i) {
      words[i] = kind == 0 ? Next() : kind == 1 ? Extreme() : Next() & Next() & Next();
    }
    const Array<float> levels = Floats(workers_ * blocks_ * format.levels);
    Array<float> values(size_);
    Call(MeanOfLargest{words.data(), levels.data(), workers_, size_, k, chunk, bits,
                       splits_.data(), blocks_, values.data()});
    std::vector<float> sum(size_, 0);
    const auto read = [&](const uint32_t* from, int64_t at, int64_t count) {
      int64_t number = 0;
      for (int64_t i = 0; i < count; ++i) {
        number |= int64_t{from[(at + i) / 32] >> (at + i) % 32 & 1} << i;
      }
      return number;
    };
    for (int64_t i = 0; i < workers_; ++i) {
      for (int64_t b = 0; b < blocks_; ++b) {
        const int64_t row = i * blocks_ + b, width = splits_[b + 1] - splits_[b];
        const uint32_t* const from = words.data() + row * format.words;
        std::vector<float> own(width, 0);
        int64_t rank = 0;
        for (int64_t at = 0; at < format.unary && rank < k; ++at) {
          if (read(from, at, 1) == 0) continue;
          const int64_t lower =
              read(from, format.unary + rank * format.low, format.low);
          const int64_t j = ((at - rank) << format.low) + lower;
          const int64_t first = format.unary + k * format.low;
          const int64_t value = read(from, first + rank++ * bits, bits);
          if (j >= width) continue;
          const float level =
              levels.data()[row * format.levels + value % format.levels];
          own[j] += value < format.levels ? level : -level;
        }
        for (int64_t j = 0; j < width; ++j) sum[splits_[b] + j] += own[j];
      }
    }
    ForEachElement([&](int64_t j, int64_t) {
      const float mean = sum[j] / static_cast<float>(workers_);
      return Same(values[j] + 0.0f, mean + 0.0f);
    });
  }

  int64_t faults() const { return faults_; }

 private:
  // Runs a kernel in one piece, or in two of any length.
  template <typename Kernel>
  void Call(const Kernel& args) {
    cut_ = Below(2) ? Below(1 << 16) : 0;
    tfgradcomp::Run(Parallel{cut_ ? InTwo : nullptr, this}, args);
  }

  static void InTwo(void* pool, int64_t units, int64_t,
                    void (*body)(void*, int64_t, int64_t), void* closure) {
    const int64_t middle = units * static_cast<const Fuzzer*>(pool)->cut_ >> 16;
    if (middle < units) body(closure, middle, units);
    if (middle > 0) body(closure, 0, middle);
  }

  void NewShape() {
    constexpr int64_t kSizes[] = {0, 1, 2, 19, 20, 21, 31, 32, 33, 40, 41, 63, 64, 65};
    size_ = Below(2) ? kSizes[Below(14)] : Below(150);
    if (Below(200) == 0) size_ = Below(6000);
    workers_ = 1 + Below(Below(4) ? 4 : 20);
    const bool one_block = Below(3) == 0;
    std::vector<int64_t> splits = {0};
    while (splits.back() < size_) {
      const int64_t width = one_block ? size_ : 1 + Below(1 << Below(8));
      splits.push_back(std::min(size_, splits.back() + width));
    }
    blocks_ = static_cast<int64_t>(splits.size()) - 1;
    splits_ = Array<int64_t>(blocks_ + 1);
    std::copy(splits.begin(), splits.end(), splits_.data());
  }

  Array<uint32_t> Words(uint64_t base, int64_t rows) {
    Array<uint32_t> words(rows * WordsFor(size_, base));
    const uint32_t kind = Below(4);
    const int digits = DigitsPerWord(base);
    for (int64_t i = 0; i < words.count(); ++i) {
      words[i] = kind == 0 ? Next() : Extreme();
      if (kind >= 2) {
        // As it would be packed, and then one of a few words with some bits changed.
        uint64_t value = 0;
        for (int j = 0; j < digits; ++j) value = value * base + Next() % base;
        words[i] = static_cast<uint32_t>(value);
        if (Below(4) == 0) words[i] ^= uint32_t{1} << Below(32);
        if (Below(16) == 0) words[i] = ~words[i];
      }
    }
    return words;
  }

  uint32_t Extreme() {
    constexpr uint32_t kWords[] = {0,          1,          0x7FFFFFFF, 0x80000000,
                                   0x80000001, 0xFFFFFFFF, 0x0FFFFFFF, 0x10000000,
                                   3486784400, 3486784401, 0xFFFEFFFF, 0x00010000};
    const uint32_t word = kWords[Below(12)];
    return Below(2) ? word : word + Below(5) - 2;
  }

  // Also those with digits that do not fill the word, and with one digit.
  uint64_t AnyBase() {
    constexpr uint64_t kBases[] = {
        2,     3,     4,      5,        9,          17,         40,        41,   84,
        85,    255,   256,    257,      1625,       1626,       1627,      4097, 65535,
        65536, 65537, 100003, 1u << 31, 0x80000001, 0xFFFFFFFF, 1ull << 32};
    return kBases[Below(sizeof(kBases) / sizeof(*kBases))];
  }

  // A base whose sums stay below 2^31, as the ops demand.
  uint64_t SumBase() {
    for (;;) {
      const uint64_t base = AnyBase();
      if (2 * workers_ * (base - 1) < (uint64_t{1} << 31) - 5000) return base;
    }
  }

  static uint64_t Quotient(uint32_t word, uint64_t base, int64_t j) {
    uint64_t rest = word;
    for (int64_t k = j % DigitsPerWord(base); k > 0; --k) rest /= base;
    return rest;
  }
  uint32_t Digit(const Array<uint32_t>& words, uint64_t base, int64_t row, int64_t j) {
    const int64_t at = row * WordsFor(size_, base) + j / DigitsPerWord(base);
    return static_cast<uint32_t>(Quotient(words.data()[at], base, j) % base);
  }
  uint64_t Total(const Array<uint32_t>& words, uint64_t base, int64_t j) {
    uint64_t total = 0;
    for (int64_t i = 0; i < workers_; ++i) total += Digit(words, base, i, j);
    return total;
  }
  float MeanSign(const Array<uint32_t>& words, const Array<float>& scale, int64_t j,
                 int64_t b) {
    float sum = 0;
    for (int64_t i = 0; i < workers_; ++i) {
      const float one = scale.data()[i * blocks_ + b];
      const float value = Digit(words, 2, i, j) ? one : -one;
      sum = i == 0 ? value : sum + value;
    }
    return sum / static_cast<float>(workers_);
  }

  Array<float> Floats(int64_t count) {
    Array<float> numbers(count);
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits = Next();
      if (Below(4)) bits = (bits & 0x807FFFFF) | (115 + Below(24)) << 23;
      numbers[i] = FloatOf(bits);
    }
    return numbers;
  }

  template <typename Check>
  void ForEachElement(const Check& check) {
    for (int64_t b = 0; b < blocks_; ++b) {
      for (int64_t j = splits_[b]; j < splits_[b + 1]; ++j) Expect(check(j, b));
    }
  }

  static bool Same(float a, float b) {
    return BitsOf(a) == BitsOf(b) || (a != a && b != b);
  }
  void Expect(bool holds) { faults_ += !holds; }

  uint32_t Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  uint32_t Below(uint32_t bound) {
    return static_cast<uint32_t>(uint64_t{Next()} * bound >> 32);
  }

  uint64_t state_;
  int64_t size_ = 0, workers_ = 0, blocks_ = 0, faults_ = 0, cut_ = 0;
  Array<int64_t> splits_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  if (!tfgradcomp::SetInstructionSet(argv[1])) return 77;
  const int64_t messages = std::atoll(argv[2]);
  constexpr struct {
    const char* name;
    void (Fuzzer::*decode)();
  } kDecoders[] = {{"codes", &Fuzzer::Unpack},        {"sums", &Fuzzer::Sum},
                   {"levels", &Fuzzer::Levels},       {"signs", &Fuzzer::Signs},
                   {"tables", &Fuzzer::Tables},       {"votes", &Fuzzer::Votes},
                   {"residuals", &Fuzzer::Residuals}, {"sparse", &Fuzzer::Sparse},
                   {"largest", &Fuzzer::Largest}};
  bool good = true;
  for (const auto& decoder : kDecoders) {
    Fuzzer fuzzer(std::strtoull(argv[3], nullptr, 10));
    int64_t done = 0;
    while (done < messages) done += fuzzer.Run([&] { (fuzzer.*decoder.decode)(); });
    std::printf("%s, %s: %lld messages, %lld faults\n", argv[1], decoder.name,
                static_cast<long long>(done), static_cast<long long>(fuzzer.faults()));
    good = good && fuzzer.faults() == 0;
  }
  return good ? 0 : 1;
}
