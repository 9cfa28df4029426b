// Majority votes: bit-sliced for plain signs, else by codes.

// Loads a word for each lane of a vector; only `count` words exist.
inline I LoadWords(const uint32_t* words, int64_t count) {
  int32_t buffer[kWidth] = {};
  memcpy(buffer, words, Smaller(kWidth, count) * sizeof(uint32_t));
  return LoadInts(buffer);
}

// Votes of base-2 words, 32 votes per lane. The numbers of plus signs are bit-sliced:
// bit k of all counts is in one word.
class SlicedVote {
 public:
  SlicedVote(const uint32_t* words, int64_t num_workers, int64_t stride)
      : words_(words), num_workers_(num_workers), stride_(stride) {
    while (num_workers >> planes_) ++planes_;
  }

  // The elements whose number of plus signs is above half, and those with exactly half.
  void At(int64_t word, I* above, I* tied) const {
    I planes[64];
    for (int k = 0; k < planes_; ++k) planes[k] = SetInts(0);
    for (int64_t i = 0; i < num_workers_; ++i) {
      I carry = LoadWords(words_ + i * stride_ + word, stride_ - word);
      // i + 1 signs need no higher plane.
      for (int k = 0; (i + 1) >> k; ++k) {
        const I sum = Xor(planes[k], carry);
        carry = And(planes[k], carry);
        planes[k] = sum;
      }
    }
    const int64_t half = num_workers_ / 2;
    I more = SetInts(0), equal = SetInts(-1);
    for (int k = planes_ - 1; k >= 0; --k) {
      if (half >> k & 1) {
        equal = And(equal, planes[k]);
      } else {
        more = Or(more, And(equal, planes[k]));
        equal = AndNot(equal, planes[k]);
      }
    }
    *above = more;
    *tied = num_workers_ % 2 ? SetInts(0) : equal;
  }

 private:
  const uint32_t* words_;
  int64_t num_workers_, stride_;
  int planes_ = 0;
};

void VoteBySlices(const Parallel& parallel, const MajorityVote& args) {
  const int64_t stride = WordsFor(args.size, 2);
  const SlicedVote vote(args.words, args.num_workers, stride);
  constexpr int64_t kTileWords = kTernaryTile / kGroup;
  For(parallel, CeilDiv(stride, kTileWords), 4 * kTileWords * (args.num_workers + 1),
      [&](int64_t begin, int64_t end) {
        int32_t plus[kTileWords + kWidth] = {}, tied[kTileWords + kWidth] = {};
        CoinReader reader(args.stream);
        for (int64_t tile = begin; tile < end; ++tile) {
          const int64_t first = tile * kTileWords;
          const int64_t words = Smaller(kTileWords, stride - first);
          for (int64_t w = 0; w < words; w += kWidth) {
            I above, equal;
            vote.At(first + w, &above, &equal);
            StoreInts(plus + w, above);
            StoreInts(tied + w, equal);
          }
          for (int64_t w = 0; w < words; ++w) {
            if (args.stream != nullptr && tied[w] != 0) {
              const uint32_t coins = reader.At((first + w) * kGroup);
              plus[w] |= tied[w] & static_cast<int32_t>(coins);
              tied[w] = 0;
            }
            const uint32_t minus = ~static_cast<uint32_t>(plus[w] | tied[w]);
            tied[w] = static_cast<int32_t>(minus);
          }
          const int64_t count = Smaller(kTernaryTile, args.size - first * kGroup);
          const uint32_t* bits = reinterpret_cast<const uint32_t*>(plus);
          if (args.reply_base == 2) {
            memcpy(args.votes + first, bits, words * sizeof(uint32_t));
            args.votes[first + words - 1] &= LowBits(count - (words - 1) * kGroup);
          } else {
            PackTernaryTile(bits, reinterpret_cast<const uint32_t*>(tied), count,
                            args.votes + first * kGroup / kTernaryDigits);
          }
        }
      });
}

// Turns the sums of a group's codes into the codes of its votes.
void VoteOfGroup(const MajorityVote& args, int32_t step, int64_t begin, int64_t count,
                 CoinReader* reader, int32_t* codes) {
  const int32_t num_workers = static_cast<int32_t>(args.num_workers);
  const int32_t quorum = args.reply_base == 3 ? static_cast<int32_t>(args.quorum) : 0;
  int32_t net[kGroup], coins[kGroup] = {};
  bool tied = false;
  for (int i = 0; i < count; ++i) {
    net[i] = step * codes[i] - num_workers;
    tied |= net[i] == 0;
  }
  if (tied && args.stream != nullptr) {
    const uint32_t bits = reader->At(begin);
    for (int i = 0; i < kGroup; ++i) coins[i] = (bits >> i & 1) ? 1 : -1;
  }
  for (int i = 0; i < count; ++i) {
    int32_t vote = (net[i] > 0) - (net[i] < 0);
    vote = net[i] == 0 ? coins[i] : vote;
    vote = net[i] < quorum && -net[i] < quorum ? 0 : vote;
    codes[i] = args.reply_base == 2 ? (vote > 0) : vote + 1;
  }
}

void VoteByCodes(const Parallel& parallel, const MajorityVote& args) {
  const Digits in(args.base), out(args.reply_base);
  // Tiles are whole groups and whole words of either base.
  constexpr int64_t kVotes = 1920;
  const int64_t words_in = kVotes / in.count(), words_out = kVotes / out.count();
  const int64_t words = WordsFor(args.size, args.base);
  const int32_t step = args.base == 2 ? 2 : 1;
  For(parallel, CeilDiv(args.size, kVotes), 8 * kVotes,
      [&](int64_t begin, int64_t end) {
        CoinReader reader(args.stream);
        int32_t codes[kTile + kSlack];
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t first = unit * kVotes, word = unit * words_in;
          const int64_t count = Smaller(kVotes, args.size - first);
          in.Sum(args.words + word, args.num_workers, words,
                 Smaller(words_in, words - word), codes);
          for (int64_t j = 0; j < count; j += kGroup) {
            VoteOfGroup(args, step, first + j, Smaller(kGroup, count - j), &reader,
                        codes + j);
          }
          out.Pack(codes, count, kTile + kSlack, args.votes + unit * words_out);
        }
      });
}

void Kernel(const Parallel& parallel, const MajorityVote& args) {
  const bool has_quorum = args.reply_base == 3 && args.quorum > 0;
  if (args.base == 2 && !has_quorum) {
    VoteBySlices(parallel, args);
  } else {
    VoteByCodes(parallel, args);
  }
}
