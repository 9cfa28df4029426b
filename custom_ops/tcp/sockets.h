// What a mesh asks of the kernel for its sockets.

#ifndef TFGRADCOMP_CUSTOM_OPS_TCP_SOCKETS_H_
#define TFGRADCOMP_CUSTOM_OPS_TCP_SOCKETS_H_

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tfgradcomp {

// Bytes of a message that must have come to wake the thread that receives, which on a
// slow link would wake for each packet: up to a fifth of an exchange's processor time.
constexpr uint64_t kBytesToWake = 64 * 1024;

inline void PrepareSocket(int socket) {
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  const int yes = 1, idle = 10, interval = 5, count = 6, unanswered = 60'000;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  // A peer whose machine has gone does not close its connection.
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof(yes));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, sizeof(unanswered));
}

// Keeps the queues in front of a slow link short. Used by the thread that receives.
//
// Connections that share a link have shares of it in proportion to their windows, which
// differ by their histories. In an exchange, where every message is waited for, the
// quick ones gain nothing. Equal windows give equal shares, and no packet is lost if
// their sum fits into the buffer of the link.
class ReceiveWindow {
 public:
  void Add(int socket) { sockets_.push_back(socket); }

  // Returns how many bytes must have come, of so many that are left of a message, to
  // wake the thread; the sender never waits for it.
  uint64_t BytesToWake(uint64_t left) const {
    return std::clamp<uint64_t>(left, 1, std::min(kBytesToWake, bytes_ / 2));
  }

  // Notes that so many more messages have begun to come, or fewer if it is negative.
  void Note(int begun) {
    const Clock::time_point now = Clock::now();
    const bool was_coming = coming_ > 0;
    coming_ += begun;
    // Between messages the link may be idle.
    if (was_coming) seconds_ += std::chrono::duration<double>(now - last_).count();
    last_ = now;
    const bool is_known = seconds_ >= kSecondsOfRate;
    if (was_coming == (coming_ > 0) && !is_known) return;
    const Counters counters = Read();
    if (was_coming) received_ += counters.bytes - before_;
    before_ = counters.bytes;
    if (is_known) Update(counters);
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Time with messages on their way, after which their rate is known.
  static constexpr double kSecondsOfRate = 0.02;
  // What remains of the highest rate after that time.
  static constexpr double kRemains = 63. / 64;
  // Time that what is under way on all connections takes on the link, besides a round
  // trip. Below 2.5 ms steps gain no more; 10 ms have half of the effect.
  static constexpr double kSecondsInQueue = 0.005;
  // Messages to the next process only have one connection for all: their share is not
  // smaller than that of so many.
  static constexpr double kMostShares = 3;
  // A window of kMostBytes or more is left to the kernel: so quick a link has no queue
  // that matters, and a thread that waits for a core must not stop it.
  static constexpr uint64_t kLeastBytes = 16 * 1024, kMostBytes = 96 * 1024;
  static constexpr uint64_t kUnlimited = 1 << 30;
  // A sender may wait 200 ms for a window of less than one packet.
  static constexpr uint64_t kLeastPackets = 8;
  // Offsets in Linux' tcp_info, of which libraries declare the beginning.
  static constexpr size_t kPacket = 84, kReceived = 128, kRoundTrip = 148;

  struct Counters {
    uint64_t bytes = 0;     // Received by the kernel, on all connections.
    double round_trip = 0;  // Seconds to the farthest process without queues.
    uint64_t packet = 0;    // Bytes of the largest one.
  };

  Counters Read() const {
    Counters counters;
    for (const int socket : sockets_) {
      uint64_t bytes = 0;
      uint32_t packet = 0, microseconds = 0;
      char info[kRoundTrip + sizeof(microseconds)] = {};
      socklen_t size = sizeof(info);
      getsockopt(socket, IPPROTO_TCP, TCP_INFO, info, &size);
      std::memcpy(&bytes, info + kReceived, sizeof(bytes));
      std::memcpy(&packet, info + kPacket, sizeof(packet));
      std::memcpy(&microseconds, info + kRoundTrip, sizeof(microseconds));
      counters.bytes += bytes;
      counters.packet = std::max<uint64_t>(counters.packet, packet);
      // All bits are set before one has been measured.
      if (microseconds == UINT32_MAX) continue;
      counters.round_trip = std::max(counters.round_trip, 1e-6 * microseconds);
    }
    return counters;
  }

  void Update(const Counters& counters) {
    rate_ = std::max(received_ / seconds_, kRemains * rate_);
    seconds_ = 0;
    received_ = 0;
    if (rate_ == 0) return;  // Not all kernels count.
    const double shares = std::min<double>(sockets_.size(), kMostShares);
    const double seconds = kSecondsInQueue / shares + counters.round_trip;
    const uint64_t window = std::max({static_cast<uint64_t>(rate_ * seconds),
                                      kLeastBytes, kLeastPackets * counters.packet});
    if (window >= kMostBytes && bytes_ == kUnlimited) return;
    bytes_ = window < kMostBytes ? window : kUnlimited;
    const int value = static_cast<int>(bytes_);
    // Again each time: the kernel raises it when it enlarges a buffer.
    for (const int socket : sockets_) {
      setsockopt(socket, IPPROTO_TCP, TCP_WINDOW_CLAMP, &value, sizeof(value));
    }
  }

  std::vector<int> sockets_;
  Clock::time_point last_;
  int coming_ = 0;
  double seconds_ = 0, rate_ = 0;
  uint64_t received_ = 0, before_ = 0;
  uint64_t bytes_ = kUnlimited;  // On their way on a connection, or not read yet.
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TCP_SOCKETS_H_
