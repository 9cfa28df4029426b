// Receives over a TCP connection whose sender is paced, then over one that is not.
//
// The argument is the number of bytes of a packet. Prints the kernel's limit of the
// receive window after each.

#include <arpa/inet.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../custom_ops/tcp/sockets.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLeft = 1 << 20;

void Check(bool is_right, const char* what) {
  if (is_right) return;
  std::perror(what);
  std::exit(1);
}

// Connects two sockets.
void Connect(int packet, int* sender, int* receiver) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  *sender = socket(AF_INET, SOCK_STREAM, 0);
  for (const int one : {listener, *sender})
    setsockopt(one, IPPROTO_TCP, TCP_MAXSEG, &packet, sizeof(packet));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const place = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(address);
  Check(bind(listener, place, size) == 0 && listen(listener, 1) == 0, "listen");
  Check(getsockname(listener, place, &size) == 0, "getsockname");
  Check(connect(*sender, place, size) == 0, "connect");
  *receiver = accept(listener, nullptr, nullptr);
  Check(*receiver >= 0, "accept");
}

int Limit(int socket) {
  int value = 0;
  socklen_t size = sizeof(value);
  Check(getsockopt(socket, IPPROTO_TCP, TCP_WINDOW_CLAMP, &value, &size) == 0, "limit");
  return value;
}

}  // namespace

int main(int, char** arguments) {
  int sender, receiver;
  Connect(std::atoi(arguments[1]), &sender, &receiver);
  const auto pace = [sender](unsigned int bytes_a_second) {
    Check(setsockopt(sender, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes_a_second,
                     sizeof(bytes_a_second)) == 0,
          "SO_MAX_PACING_RATE");
  };
  tfgradcomp::ReceiveWindow window;
  window.Add(receiver);
  Check(window.BytesToWake(kLeft) == tfgradcomp::kBytesToWake, "without a limit");
  std::thread sending([&] {
    const std::vector<char> bytes(16 * 1024);
    while (send(sender, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) continue;
  });
  std::vector<char> buffer(16 * 1024);
  // One message, of which there is always more; until a limit, or its end.
  const auto receive = [&](bool until_limited, int seconds) {
    const auto end = Clock::now() + std::chrono::seconds(seconds);
    const auto is_limited = [&] {
      return window.BytesToWake(kLeft) < tfgradcomp::kBytesToWake;
    };
    while (is_limited() != until_limited && Clock::now() < end) {
      Check(recv(receiver, buffer.data(), buffer.size(), 0) > 0, "recv");
      window.Note(0);
    }
    std::printf("%d\n", Limit(receiver));
  };
  // 40 kB take 5 ms.
  pace(8'000'000);
  // What has come before, in the first buffers, was not paced.
  for (int bytes = 0; bytes < 1'000'000;) {
    bytes += recv(receiver, buffer.data(), buffer.size(), 0);
  }
  window.Note(1);
  receive(true, 1);
  pace(~0U);
  receive(false, 20);
  close(receiver);
  sending.join();
}
