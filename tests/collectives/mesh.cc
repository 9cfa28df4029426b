// Exchanges messages between workers in one process, each with a mesh of its own: built
// with sanitizers, so that a race or an access outside a buffer ends it.
//
// Ends with 0 if all messages have arrived as they were sent, and if the end of a
// worker has ended the calls that wait for it.

#include "../../custom_ops/tcp/mesh.h"

#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using tfgradcomp::Mesh;
using tfgradcomp::Span;

constexpr int kWorkers = 3, kSites = 8, kThreads = 3, kRounds = 20;
// Nothing, a word, more than the poster sends, more than a socket holds.
constexpr size_t kBytes[] = {0, 4, 100 * 1000, 3 * 1000 * 1000};

std::vector<Mesh*> Meshes() {
  std::vector<std::vector<int>> sockets(kWorkers, std::vector<int>(kWorkers, -1));
  for (int i = 0; i < kWorkers; ++i) {
    for (int j = 0; j < i; ++j) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) std::abort();
      sockets[i][j] = pair[0];
      sockets[j][i] = pair[1];
    }
  }
  // Never destroyed, and reachable until the end.
  static auto* const all = new std::vector<Mesh*>;
  std::vector<Mesh*> meshes;
  for (int i = 0; i < kWorkers; ++i)
    meshes.push_back(new Mesh(i, sockets[i], {0, 1, 2}));
  all->insert(all->end(), meshes.begin(), meshes.end());
  return meshes;
}

class Counter {
 public:
  void Add() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    changed_.notify_all();
  }

  void WaitFor(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return count_ == count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

// Messages of every other call go to the next worker alone.
int Peers(int site) { return site % 2 == 0 ? kWorkers - 1 : 1; }

char Pattern(int from, int to, int site, int round) {
  return static_cast<char>(1 + from + 3 * to + 9 * site + 72 * round);
}

// Every worker posts the calls of a round from several threads, in its own order.
int Exchange() {
  const std::vector<Mesh*> meshes = Meshes();
  std::atomic<int> wrong{0};
  std::vector<std::thread> workers;
  for (int rank = 0; rank < kWorkers; ++rank) {
    workers.emplace_back([&, rank] {
      std::mt19937 random(rank);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<int> order(kSites);
        for (int site = 0; site < kSites; ++site) order[site] = site;
        std::shuffle(order.begin(), order.end(), random);
        Counter done;
        std::vector<std::vector<std::string>> sent(kSites), got(kSites);
        const auto post = [&](int site) {
          const size_t bytes = kBytes[(site + round) % 4];
          for (int k = 0; k < kWorkers; ++k) {
            // Other sizes for each pair.
            sent[site].emplace_back(bytes + k, Pattern(rank, k, site, round));
            got[site].emplace_back(bytes + rank, '\0');
          }
          meshes[rank]->Post(
              site, "a site",
              [&](int k) { return Span{sent[site][k].data(), sent[site][k].size()}; },
              [&](int k) { return Span{got[site][k].data(), got[site][k].size()}; },
              Peers(site),
              [&](const std::string& error) {
                wrong += !error.empty();
                done.Add();
              });
        };
        std::vector<std::thread> posters;
        for (int thread = 0; thread < kThreads; ++thread) {
          posters.emplace_back([&, thread] {
            for (int i = thread; i < kSites; i += kThreads) post(order[i]);
          });
        }
        for (std::thread& poster : posters) poster.join();
        done.WaitFor(kSites);
        for (int site = 0; site < kSites; ++site) {
          for (int i = 1; i < kWorkers; ++i) {
            const int k = (rank + kWorkers - i) % kWorkers;
            const bool has_come = i <= Peers(site);
            const std::string right(got[site][k].size(),
                                    has_come ? Pattern(k, rank, site, round) : '\0');
            wrong += got[site][k] != right;
          }
        }
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return wrong;
}

// Posts a call of one message of `bytes` for each peer; returns the error.
std::string Call(Mesh* mesh, int site, size_t bytes) {
  std::string error, out(bytes, 'x');
  std::vector<std::string> in(kWorkers, std::string(bytes, '\0'));
  Counter done;
  mesh->Post(
      site, "the last gather", [&](int) { return Span{out.data(), bytes}; },
      [&](int k) { return Span{in[k].data(), bytes}; }, kWorkers - 1,
      [&](const std::string& given) {
        error = given;
        done.Add();
      });
  done.WaitFor(1);
  return error;
}

// A worker ends while the others wait for it, and send it more than a socket holds.
int EndOfAWorker(size_t bytes, bool differs) {
  const std::vector<Mesh*> meshes = Meshes();
  std::string errors[2], third;
  std::thread first([&] { errors[0] = Call(meshes[0], 1, bytes); });
  std::thread second([&] { errors[1] = Call(meshes[1], 1, bytes); });
  std::thread last([&] {
    if (differs) {
      third = Call(meshes[2], 1, bytes + 1);
    } else {
      meshes[2]->Break("a step has failed here");
    }
  });
  first.join();
  second.join();
  last.join();
  int wrong = 0;
  const std::string reason = differs ? " bytes to worker " : "worker 2 has ended";
  for (std::string& error : errors) {
    for (int again = 0; again < 2; ++again) {
      if (error.find(reason) == std::string::npos ||
          error.find("the last gather") == std::string::npos) {
        // One of two that are told of the other's end is enough.
        if (!differs || error.empty()) ++wrong;
        std::printf("error: %s\n", error.c_str());
      }
      // Later calls fail as well, and at once.
      error = Call(meshes[&error - errors], 2, 4);
    }
  }
  return wrong;
}

}  // namespace

int main() {
  int wrong = Exchange();
  std::printf("%d wrong messages\n", wrong);
  for (const size_t bytes : {size_t{4}, size_t{3 * 1000 * 1000}}) {
    for (const bool differs : {false, true}) wrong += EndOfAWorker(bytes, differs);
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
