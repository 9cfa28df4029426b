// Buffers and calls of the kernels for votes.

#ifndef TFGRADCOMP_TESTS_OPS_KERNEL_CASES_VOTES_H_
#define TFGRADCOMP_TESTS_OPS_KERNEL_CASES_VOTES_H_

#include <cstdint>
#include <string>

#include "../../../custom_ops/kernels.h"
#include "../../../custom_ops/word_format.h"
#include "inputs.h"

namespace tfgradcomp_cases {

template <typename Visit>
void VisitBuffers(MajorityVote& a, Visit& visit) {
  visit.Input(a.words, a.num_workers * WordsFor(a.size, a.base));
  if (a.stream != nullptr) visit.Input(a.stream, 3);
  visit.Output(a.votes, WordsFor(a.size, a.reply_base));
}

template <typename Run>
void ForEachCallOfVotes(Inputs& in, bool independent_of_blocks, Run&& run) {
  const int64_t n = in.size;
  const int64_t workers = in.num_workers;
  const uint64_t* const streams[] = {nullptr, in.stream.data()};

  if (!independent_of_blocks) return;
  for (const uint64_t* stream : streams) {
    const std::string drawn = With("stream", stream != nullptr);
    for (int64_t base : {2, 3}) {
      const Array<uint32_t> words = in.Words(base);
      for (int64_t reply_base : {2, 3}) {
        for (int64_t quorum : {0, 2}) {
          run("MajorityVote" + drawn + With("base", base) +
                  With("reply_base", reply_base) + With("quorum", quorum),
              MajorityVote{
                  words.data(), workers, n, base, reply_base, quorum, stream, {}});
        }
      }
    }
  }
}

}  // namespace tfgradcomp_cases

#endif  // TFGRADCOMP_TESTS_OPS_KERNEL_CASES_VOTES_H_
