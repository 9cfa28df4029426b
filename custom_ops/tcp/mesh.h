// Messages between processes over connected sockets, one for each pair, without
// TensorFlow.
//
// A call is one message to each peer and one from each peer, or in a ring one to the
// next process and one from the previous one. Messages to a peer leave one after the
// other, in the order in which they are posted; two large ones that shared a connection
// would both arrive late. They are told apart by the call site and the number of the
// call there, so that processes may post their calls in different orders.
//
// Two threads belong to a mesh: one receives, one sends what a socket did not take at
// once. Nothing blocks the thread that posts. A mesh lives as long as its process.

#ifndef TFGRADCOMP_CUSTOM_OPS_TCP_MESH_H_
#define TFGRADCOMP_CUSTOM_OPS_TCP_MESH_H_

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sockets.h"

namespace tfgradcomp {

// What goes before the bytes of a message. All processes have the same byte order: the
// vectors of numbers behind it have that of the machine as well.
struct MessageHeader {
  uint64_t site;
  uint64_t call;
  uint64_t bytes;
};

// A longer message is none of ours.
constexpr uint64_t kMostMessageBytes = uint64_t{1} << 40;
// The thread that posts a message of so many bytes sends it, if it can at once; a
// longer one waits for the thread that sends.
constexpr uint64_t kBytesSentByCaller = 64 * 1024;
// Bytes that are received from a peer before it is the next one's turn.
constexpr uint64_t kBytesInTurn = 1024 * 1024;

// The place of a message in memory.
struct Span {
  char* data;
  uint64_t bytes;
};

class Mesh {
 public:
  // Called once, by any thread, with the reason of a failure; empty: it succeeded. The
  // buffers of the call are not used afterwards.
  using Done = std::function<void(const std::string& error)>;

  // Member k of the ring is worker workers[k], and sockets[k] is connected to it; that
  // of this process, at `place`, is not used.
  Mesh(int place, const std::vector<int>& sockets, const std::vector<int>& workers)
      : place_(place), readable_(epoll_create1(EPOLL_CLOEXEC)), workers_(workers) {
    writable_ = epoll_create1(EPOLL_CLOEXEC);
    for (size_t k = 0; k < sockets.size(); ++k) {
      links_.push_back(std::make_unique<Link>(static_cast<int>(k), sockets[k]));
      if (static_cast<int>(k) == place) continue;
      PrepareSocket(sockets[k]);
      window_.Add(sockets[k]);
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.ptr = links_.back().get();
      epoll_ctl(readable_, EPOLL_CTL_ADD, sockets[k], &event);
    }
    std::thread([this] {
      Wait(readable_, [this](Link* link) { Receive(link); });
    }).detach();
    std::thread([this] {
      Wait(writable_, [this](Link* link) { Send(link, false); });
    }).detach();
  }

  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int place() const { return place_; }
  int size() const { return static_cast<int>(links_.size()); }
  int worker(int k) const { return workers_[k]; }

  // Posts a call: the Span outgoing(k) to member k, and from it into incoming(k), for
  // all others, or for so many members that follow, and as many that precede.
  template <typename Outgoing, typename Incoming>
  void Post(uint64_t site, const std::string& name, const Outgoing& outgoing,
            const Incoming& incoming, int peers, Done done) {
    // One part more, so that the call is there until all is posted.
    auto* call = new Call(site, name, std::move(done), 2 * peers + 1);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      call->number = next_call_[site]++;
    }
    // Each process begins with another peer.
    for (int i = 1; i <= peers; ++i) {
      Link* link = links_[(place_ + size() - i) % size()].get();
      Expect(link, call, incoming(link->peer));
    }
    for (int i = 1; i <= peers; ++i) {
      Link* link = links_[(place_ + i) % size()].get();
      Enqueue(link, call, outgoing(link->peer));
    }
    Finish(call, "");
  }

  // Ends all connections, and with them all calls here and at the peers.
  void Break(const std::string& reason) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!reason_.empty()) return;
      reason_ = reason;
    }
    for (const auto& link : links_) {
      if (link->peer != place_) shutdown(link->socket, SHUT_RDWR);
    }
  }

 private:
  struct Call {
    Call(uint64_t site, const std::string& name, Done done, int parts)
        : site(site), name(name), done(std::move(done)), parts(parts) {}

    const uint64_t site;
    const std::string name;
    const Done done;
    uint64_t number = 0;
    std::atomic<int> parts;
    std::string error;  // The first one; under the mutex of the mesh.
  };

  struct Sent {
    Call* call;
    MessageHeader header;
    char* data;
    uint64_t sent = 0;  // Of header and data.
  };

  // A message that is expected, or has come before it was.
  struct Received {
    Call* call = nullptr;  // None: it has not been posted.
    Span target{};
    std::unique_ptr<char[]> buffer;
    uint64_t bytes = 0;
    bool complete = false;
  };

  struct Link {
    Link(int peer, int socket) : peer(peer), socket(socket) {}

    const int peer, socket;
    std::mutex mutex;  // Of what follows.
    std::deque<Sent> queue;
    bool has_sender = false;  // Only this thread sends, and takes from the queue.
    bool is_registered = false;
    bool is_closed = false;
    std::map<std::pair<uint64_t, uint64_t>, Received> messages;
    // Of the thread that receives.
    MessageHeader header{};
    uint64_t header_bytes = 0;
    Received* current = nullptr;
    char* next = nullptr;
    uint64_t left = 0;
    uint64_t to_wake = 1;
  };

  template <typename Handle>
  static void Wait(int epoll, const Handle& handle) {
    epoll_event events[64];
    for (;;) {
      const int count = epoll_wait(epoll, events, 64, -1);
      for (int i = 0; i < count; ++i) handle(static_cast<Link*>(events[i].data.ptr));
    }
  }

  // Ends a part of a call; the last part ends the call.
  void Finish(Call* call, const std::string& error) {
    if (!error.empty()) Fail(call, error);
    if (--call->parts > 0) return;
    std::string reason;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!call->error.empty()) {
        reason =
            (reason_.empty() ? call->error : reason_) + ". Exchange: " + call->name;
      }
    }
    call->done(reason);
    delete call;
  }

  // Lets a call fail, and soon all others: a peer that ends its connections because
  // another one has ended is not the cause, so all are told of that one first.
  void Fail(Call* call, const std::string& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (call->error.empty())
      call->error = first_closed_.empty() ? error : first_closed_;
    if (!reason_.empty()) return;
    std::thread([this, error = call->error] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      Break(error);
    }).detach();
  }

  std::string Closed(const Link* link) {
    return Name(link->peer) + " has ended, or not answered for 60 s";
  }

  // Sending.

  void Enqueue(Link* link, Call* call, Span span) {
    bool is_sender = false;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      link->queue.push_back({call, {call->site, call->number, span.bytes}, span.data});
      is_sender = !std::exchange(link->has_sender, true);
    }
    if (is_sender) Send(link, true);
  }

  // Sends the queue. Whoever has set `has_sender` calls it.
  void Send(Link* link, bool is_caller) {
    for (;;) {
      Sent* first;
      {
        const std::lock_guard<std::mutex> lock(link->mutex);
        if (link->queue.empty()) {
          link->has_sender = false;
          return;
        }
        first = &link->queue.front();  // It stays there while others are added.
      }
      const MessageHeader& header = first->header;
      if (is_caller && header.bytes > kBytesSentByCaller) return WaitToSend(link);
      const uint64_t of_header = std::min<uint64_t>(first->sent, sizeof(header));
      const uint64_t of_data = first->sent - of_header;
      iovec parts[2];
      parts[0] = {const_cast<char*>(reinterpret_cast<const char*>(&header)) + of_header,
                  sizeof(header) - of_header};
      parts[1] = {first->data + of_data, header.bytes - of_data};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = 2;
      const ssize_t sent = sendmsg(link->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return WaitToSend(link);
      }
      if (sent > 0) first->sent += sent;
      if (sent >= 0 && first->sent < sizeof(header) + header.bytes) continue;
      Call* const call = first->call;
      {
        const std::lock_guard<std::mutex> lock(link->mutex);
        link->queue.pop_front();
      }
      Finish(call, sent < 0 ? Closed(link) : "");
    }
  }

  // Leaves the queue to the thread that sends, once the socket takes more.
  void WaitToSend(Link* link) {
    const std::lock_guard<std::mutex> lock(link->mutex);
    const int change =
        std::exchange(link->is_registered, true) ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    epoll_event event{};
    event.events = EPOLLOUT | EPOLLONESHOT;
    event.data.ptr = link;
    epoll_ctl(writable_, change, link->socket, &event);
  }

  // Receiving.

  void Expect(Link* link, Call* call, Span target) {
    const std::pair<uint64_t, uint64_t> key(call->site, call->number);
    std::string error;
    bool is_other_size = false;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      Received& message = link->messages[key];
      if (message.buffer != nullptr && message.bytes != target.bytes) {
        is_other_size = true;
        error = OtherSize(link, message.bytes, target.bytes);
      } else if (message.complete) {
        std::memcpy(target.data, message.buffer.get(), target.bytes);
      } else if (link->is_closed) {
        error = Closed(link);
      } else {
        message.call = call;
        message.target = target;
        return;
      }
      // One that is still coming in stays: `current` may point to it.
      if (message.complete || link->is_closed) link->messages.erase(key);
    }
    if (is_other_size) Break(error);
    Finish(call, error);
  }

  void Receive(Link* link) {
    const bool was_coming = link->left > 0;
    ReceiveInTurn(link);
    window_.Note((link->left > 0) - was_coming);
    const uint64_t bytes = window_.BytesToWake(link->left);
    if (std::exchange(link->to_wake, bytes) == bytes) return;
    const int value = static_cast<int>(bytes);
    setsockopt(link->socket, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof(value));
  }

  void ReceiveInTurn(Link* link) {
    uint64_t in_turn = 0;
    while (in_turn < kBytesInTurn) {
      const bool is_header = link->header_bytes < sizeof(MessageHeader);
      char* into = is_header
                       ? reinterpret_cast<char*>(&link->header) + link->header_bytes
                       : link->next;
      const uint64_t wanted =
          is_header ? sizeof(MessageHeader) - link->header_bytes : link->left;
      const ssize_t got = recv(link->socket, into, wanted, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (got <= 0) return Close(link, Closed(link));
      in_turn += got;
      if (is_header) {
        link->header_bytes += got;
        if (link->header_bytes < sizeof(MessageHeader)) return;
        if (!Begin(link)) return;
      } else {
        link->next += got;
        link->left -= got;
      }
      if (link->left == 0) {
        Complete(link);
      } else if (!is_header && static_cast<uint64_t>(got) < wanted) {
        return;  // There is no more yet.
      }
    }
  }

  // Finds the place for the message whose header has come.
  bool Begin(Link* link) {
    const MessageHeader& header = link->header;
    std::string error;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      Received& message = link->messages[{header.site, header.call}];
      if (message.call != nullptr && message.target.bytes != header.bytes) {
        error = OtherSize(link, header.bytes, message.target.bytes);
      } else if (header.bytes > kMostMessageBytes) {
        error = Name(link->peer) + " sends no message of ours";
      } else {
        message.bytes = header.bytes;
        if (message.call == nullptr) message.buffer.reset(new char[header.bytes]);
        link->current = &message;
        link->next =
            message.call != nullptr ? message.target.data : message.buffer.get();
        link->left = header.bytes;
      }
    }
    if (error.empty()) return true;
    Break(error);
    Close(link, error);
    return false;
  }

  void Complete(Link* link) {
    Call* call;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      Received& message = *std::exchange(link->current, nullptr);
      message.complete = true;
      call = message.call;
      if (call != nullptr) {
        // It was posted while the message came in.
        if (message.buffer != nullptr)
          std::memcpy(message.target.data, message.buffer.get(), message.bytes);
        link->messages.erase({link->header.site, link->header.call});
      }
      link->header_bytes = 0;
    }
    if (call != nullptr) Finish(call, "");
  }

  // Ends the calls that wait for a peer. A peer that has left because it has all that
  // it waited for is no failure yet.
  void Close(Link* link, const std::string& error) {
    epoll_ctl(readable_, EPOLL_CTL_DEL, link->socket, nullptr);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (first_closed_.empty()) first_closed_ = error;
    }
    std::vector<Call*> waiting;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      link->is_closed = true;
      for (auto message = link->messages.begin(); message != link->messages.end();) {
        if (message->second.call != nullptr) waiting.push_back(message->second.call);
        const bool stays = message->second.complete;
        message = stays ? std::next(message) : link->messages.erase(message);
      }
    }
    for (Call* call : waiting) Finish(call, error);
  }

  std::string OtherSize(const Link* link, uint64_t bytes, uint64_t expected) {
    return Name(link->peer) + " sends " + std::to_string(bytes) + " bytes to " +
           Name(place_) + ", which expects " + std::to_string(expected);
  }

  std::string Name(int k) const { return "worker " + std::to_string(workers_[k]); }

  const int place_, readable_;
  int writable_;
  ReceiveWindow window_;
  const std::vector<int> workers_;
  std::vector<std::unique_ptr<Link>> links_;
  std::mutex mutex_;  // Of what follows.
  std::string reason_, first_closed_;
  std::unordered_map<uint64_t, uint64_t> next_call_;
};

}  // namespace tfgradcomp

#endif  // TFGRADCOMP_CUSTOM_OPS_TCP_MESH_H_
