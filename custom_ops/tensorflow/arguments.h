// Checks of an op's attributes, made when a graph is built and again when it runs.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ARGUMENTS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ARGUMENTS_H_

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../chunks.h"
#include "../kernels.h"
#include "../matrices.h"
#include "../word_format.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tfgradcomp {

constexpr int64_t kMaxBase = int64_t{1} << 32;
constexpr int64_t kMaxCount = int64_t{1} << 48;  // Far from overflow.
constexpr int64_t kMaxLevels = int64_t{1} << 16;
constexpr int64_t kMaxQuorum = (int64_t{1} << 31) - 1;

template <typename... Parts>
absl::Status Invalid(const Parts&... message) {
  return absl::InvalidArgumentError(absl::StrCat(message...));
}

inline absl::Status CheckBase(int64_t base) {
  if (base >= 2 && base <= kMaxBase) return absl::OkStatus();
  return Invalid("base must be in [2, 2**32]. Received: base=", base);
}

inline absl::Status CheckCount(int64_t count) {
  if (count >= 0 && count <= kMaxCount) return absl::OkStatus();
  return Invalid("count must be in [0, 2**48]. Received: count=", count);
}

// The number of a block's levels, which are numbered by codes.
inline absl::Status CheckLevelCount(int64_t least, int64_t count) {
  if (count >= least && count <= kMaxLevels) return absl::OkStatus();
  return Invalid("levels must be at least ", least, " and at most ", kMaxLevels,
                 " a block. Received: ", count);
}

// The rules of find_levels and the number of levels that each rule finds.
inline absl::Status CheckRule(const std::string& rule, int64_t count, int64_t sweeps,
                              LevelRule* found) {
  const bool in_range = count >= 2 && count <= kMaxLevels;
  bool fits = sweeps >= 0;
  if (rule == "optimal") {
    *found = LevelRule::kOptimal;
    fits = fits && in_range && ((count - 1) & (count - 2)) == 0;
  } else if (rule == "quantiles") {
    *found = LevelRule::kQuantiles;
    fits = fits && in_range;
  } else if (rule == "symmetric") {
    *found = LevelRule::kSymmetric;
    fits = fits && count == 2;
  } else {
    *found = LevelRule::kMeans;
    fits = fits && rule == "means" && count == 3;
  }
  if (fits) return absl::OkStatus();
  return Invalid(
      "rule must be 'optimal' with a power of two plus 1 as count, 'quantiles' with a "
      "count from 2 on, 'symmetric' with count=2 or 'means' with count=3; count must "
      "be at most ",
      kMaxLevels, " and sweeps not negative. Received: rule='", rule,
      "', count=", count, ", sweeps=", sweeps);
}

// Of StatisticSums, those with these names.
inline absl::Status CheckSums(const std::vector<std::string>& names, int64_t* found) {
  *found = 0;
  for (const std::string& name : names) {
    if (name == "l1") {
      *found |= kSumL1;
    } else if (name == "sum_of_squares") {
      *found |= kSumSquares;
    } else if (name == "sum") {
      *found |= kSumPlain;
    } else {
      return Invalid("sums must be among 'l1', 'sum_of_squares' and 'sum'. Received: '",
                     name, "'");
    }
  }
  return absl::OkStatus();
}

// The sizes of the parts into which a vector of `count` elements is written.
inline absl::Status CheckSizes(const std::vector<int64_t>& sizes, int64_t num_values,
                               int64_t count) {
  int64_t total = 0;
  bool fits = static_cast<int64_t>(sizes.size()) == num_values;
  for (int64_t size : sizes) {
    fits = fits && size >= 0 && size <= count - total;
    if (fits) total += size;
  }
  if (fits && total == count) return absl::OkStatus();
  return Invalid(
      "sizes must be num_values numbers, none negative, with the sum count = ", count,
      ". Received: sizes=[", absl::StrJoin(sizes, ", "), "], num_values=", num_values);
}

// The rules of updates, each with its number of coefficients and its number of lists of
// variables beside the weights.
inline absl::Status CheckUpdateRule(const std::string& rule, UpdateRule* found,
                                    int* num_coefficients, int* num_slots) {
  const struct {
    const char* name;
    UpdateRule rule;
    int num_coefficients, num_slots;
  } rules[] = {{"sgd", UpdateRule::kSgd, 1, 0},
               {"momentum", UpdateRule::kMomentum, 2, 1},
               {"nesterov", UpdateRule::kNesterov, 2, 1},
               {"adam", UpdateRule::kAdam, 4, 2},
               {"frozen_adam", UpdateRule::kFrozenAdam, 2, 2}};
  for (const auto& known : rules) {
    if (rule != known.name) continue;
    *found = known.rule;
    *num_coefficients = known.num_coefficients;
    *num_slots = known.num_slots;
    return absl::OkStatus();
  }
  return Invalid(
      "rule must be 'sgd', 'momentum', 'nesterov', 'adam' or 'frozen_adam'. "
      "Received: rule='",
      rule, "'");
}

inline absl::Status CheckVoteBases(int64_t base, int64_t reply_base) {
  if ((base == 2 || base == 3) && (reply_base == 2 || reply_base == 3)) {
    return absl::OkStatus();
  }
  return Invalid("base and reply_base must be 2 or 3. Received: base=", base,
                 ", reply_base=", reply_base);
}

// Net votes are counted in int32.
inline absl::Status CheckQuorum(int64_t quorum) {
  if (quorum >= -kMaxQuorum && quorum <= kMaxQuorum) return absl::OkStatus();
  return Invalid("quorum must be less than 2**31 in magnitude. Received: quorum=",
                 quorum);
}

// The base of the sum of N codes: the base given, else the least that holds the sum.
inline absl::Status BaseOfSum(int64_t num_workers, int64_t base,
                              const std::vector<int64_t>& given, int64_t* sum_base) {
  if (num_workers < 1 || num_workers > (kMaxBase - 1) / (base - 1)) {
    return Invalid(
        "num_workers must be at least 1 and num_workers * (base - 1) + 1 at most "
        "2**32. Received: num_workers=",
        num_workers, ", base=", base);
  }
  const int64_t least = num_workers * (base - 1) + 1;
  *sum_base = given.empty() ? least : given[0];
  if (given.size() <= 1 && *sum_base >= least && *sum_base <= kMaxBase) {
    return absl::OkStatus();
  }
  return Invalid(
      "sum_base must be one number in [num_workers * (base - 1) + 1, 2**32]. "
      "Received: num_workers=",
      num_workers, ", base=", base, ", sum_base=", absl::StrJoin(given, ", "));
}

// Checks that step * total - zero fits into int32 for each total that N codes can have.
inline absl::Status CheckLevels(int64_t num_workers, int64_t base, int64_t step,
                                int64_t zero) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  const auto inside = [](int64_t value) { return value > -kLimit && value < kLimit; };
  // Each factor is bounded first, so that no product overflows.
  if (num_workers >= 1 && num_workers < kLimit && base <= kLimit && inside(step) &&
      inside(zero)) {
    const __int128 most = __int128{num_workers} * (base - 1);
    const __int128 top = most * step - zero;
    if (most < kLimit && top > -kLimit && top < kLimit) return absl::OkStatus();
  }
  return Invalid(
      "num_workers must be at least 1, and zero, num_workers * (base - 1) and step * "
      "num_workers * (base - 1) - zero must be less than 2**31 in magnitude. Received: "
      "num_workers=",
      num_workers, ", base=", base, ", step=", step, ", zero=", zero);
}

// An index has to fit into a sparse word.
inline absl::Status CheckSparseSize(int64_t size) {
  constexpr int64_t kLimit = int64_t{1} << tfgradcomp_format::kIndexBits;
  if (size >= 0 && size < kLimit) return absl::OkStatus();
  return Invalid("a vector of sparse words must have less than ", kLimit,
                 " elements; cut it into several. Received: ", size, " elements");
}

// The format of chunks.
inline absl::Status CheckChunkFormat(int64_t k, int64_t chunk, int64_t bits) {
  constexpr int64_t kMost = tfgradcomp_format::kMostInChunk;
  if (k >= 1 && k <= chunk && chunk <= kMost && bits >= 1 &&
      bits <= tfgradcomp_format::kMostValueBits) {
    return absl::OkStatus();
  }
  return Invalid("k must be in [1, chunk], chunk at most ", kMost,
                 " and bits in [1, 3]. Received: k=", k, ", chunk=", chunk,
                 ", bits=", bits);
}

inline absl::Status CheckVariance(float alpha, float decay) {
  if (alpha >= 0 && std::isfinite(alpha) && decay >= 0 && decay <= 1) {
    return absl::OkStatus();
  }
  return Invalid(
      "alpha must be finite and not negative, decay in [0, 1]. Received: alpha=", alpha,
      ", decay=", decay);
}

inline absl::Status CheckThreshold(float threshold) {
  if (threshold > 0 && std::isfinite(threshold)) return absl::OkStatus();
  return Invalid("threshold must be positive and finite. Received: threshold=",
                 threshold);
}

// The shapes of the tensors of a vector, and the rank of their factors; returns the
// sizes of the arrays.
inline absl::Status CheckMatrices(const std::vector<int64_t>& rows,
                                  const std::vector<int64_t>& columns, int64_t rank,
                                  MatrixTensor* sizes) {
  bool fits = rows.size() == columns.size() && rank >= 1 && rank <= kMaxCount;
  __int128 total = 0;  // Of the elements of all arrays, which bounds each of them.
  for (size_t i = 0; fits && i < rows.size(); ++i) {
    const int64_t n = rows[i], m = columns[i];
    fits = n >= 0 && n <= kMaxCount && m >= 0 && m <= kMaxCount && (n > 0 || m == 0);
    if (fits) total += m == 0 ? n : __int128{n} * m + (__int128{n} + m) * rank;
    fits = fits && total <= kMaxCount;
  }
  if (!fits) {
    return Invalid(
        "rows and columns must be as many numbers, none negative, and positive in the "
        "rows of matrices; rank must be positive, and no vector may have more than "
        "2**48 elements. Received: rows=[",
        absl::StrJoin(rows, ", "), "], columns=[", absl::StrJoin(columns, ", "),
        "], rank=", rank);
  }
  *sizes = EachTensor(rows.data(), columns.data(), static_cast<int64_t>(rows.size()),
                      rank, [](const MatrixTensor&, int64_t) {});
  return absl::OkStatus();
}

// The rows of factors, and their rank; returns the number of their elements.
inline absl::Status CheckFactors(const std::vector<int64_t>& rows, int64_t rank,
                                 int64_t* size) {
  bool fits = rank >= 1 && rank <= kMaxCount;
  __int128 total = 0;
  for (int64_t n : rows) {
    fits = fits && n >= 1 && n <= kMaxCount;
    // With the scratch memory of a factor.
    if (fits) total += (__int128{n} + kLanesOfSum) * rank;
    fits = fits && total <= kMaxCount;
  }
  if (!fits) {
    return Invalid(
        "rows and rank must be positive, and no vector may have more than 2**48 "
        "elements. Received: rows=[",
        absl::StrJoin(rows, ", "), "], rank=", rank);
  }
  *size = 0;
  for (int64_t n : rows) *size += n * rank;
  return absl::OkStatus();
}

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_ARGUMENTS_H_
