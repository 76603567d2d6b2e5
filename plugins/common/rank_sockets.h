// Ranks on several hosts, each with a connected stream socket to every other.
#pragma once

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "ranks.h"

namespace llmbuild {

// The sockets are the caller's, and stay open as long as this. Whoever waits, for whatever reason,
// takes in what others send meanwhile: full buffers hold nobody up for good.
class SocketRanks final : public Ranks {
 public:
  explicit SocketRanks(const RanksConfig& config)
      : Ranks(config, &own_failed_),
        sockets_(config.sockets, config.sockets + config.tp * config.pp),
        inboxes_(sockets_.size()),
        ended_(sockets_.size()),
        others_part_(kPieceFloats) {
    const int on = 1;  // without effect, and without harm, on sockets other than TCP's
    for (int socket : sockets_) setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }

  // The group's first rank adds the others' parts, and sends the sum back.
  void all_reduce(const Worker& worker, float* x, int64_t count) override {
    if (worker.id > 0 || tp == 1) return;
    const int root = rank - tp_rank();
    if (tp_rank() > 0) {
      send(root, x, 4 * count);
      receive(root, x, 4 * count);
      return;
    }
    for (int t = 1; t < tp; ++t) add_part_of(root + t, x, count);
    for (int t = 1; t < tp; ++t) send(root + t, x, 4 * count);
  }

  void send(int to, const void* data, int64_t bytes) override {
    const uint8_t* next = static_cast<const uint8_t*>(data);
    for (Clock::time_point deadline = Clock::now() + timeout_; bytes > 0 && !failed();) {
      const ssize_t sent = ::send(sockets_[to], next, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0) {
        wait(to, POLLOUT, deadline);
        continue;
      }
      next += sent, bytes -= sent;
      deadline = Clock::now() + timeout_;
    }
  }

  void receive(int from, void* data, int64_t bytes) override {
    uint8_t* next = static_cast<uint8_t*>(data);
    for (Clock::time_point deadline = Clock::now() + timeout_; bytes > 0 && !failed();) {
      const int64_t taken = take(from, next, bytes);
      if (taken == 0) {
        wait(from, 0, deadline);
        continue;
      }
      next += taken, bytes -= taken;
      deadline = Clock::now() + timeout_;
    }
  }

 private:
  static constexpr int kPieceFloats = 1 << 14;

  // What came while something else was waited for.
  struct Inbox {
    std::vector<uint8_t> bytes;
    size_t taken = 0;
  };

  void add_part_of(int other, float* x, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += kPieceFloats) {
      const int piece = int(std::min<int64_t>(count - begin, kPieceFloats));
      receive(other, others_part_.data(), 4 * piece);
      for (int i = 0; i < piece; ++i) x[begin + i] += others_part_[i];
    }
  }

  // Up to `bytes` of what has come from a rank.
  int64_t take(int from, uint8_t* to, int64_t bytes) {
    Inbox& inbox = inboxes_[from];
    const int64_t count = std::min<int64_t>(bytes, inbox.bytes.size() - inbox.taken);
    if (count == 0) return 0;
    std::memcpy(to, inbox.bytes.data() + inbox.taken, count);
    inbox.taken += count;
    if (inbox.taken == inbox.bytes.size()) {
      inbox.bytes.clear();
      inbox.taken = 0;
    }
    return count;
  }

  // Waits until the other rank's socket is ready for `event`, or something has come from anyone.
  void wait(int other, short event, Clock::time_point deadline) {
    if (ended_[other]) return fail(other);
    polls_.clear();
    for (size_t r = 0; r < sockets_.size(); ++r) {
      const short events = POLLIN | (int(r) == other ? event : 0);
      polls_.push_back({ended_[r] ? -1 : sockets_[r], events, 0});
    }
    using std::chrono::milliseconds;
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    const int ready = poll(polls_.data(), polls_.size(), int(std::max<int64_t>(0, left.count())));
    if (ready < 0 && errno == EINTR) return;
    if (ready <= 0) return fail(other);
    for (size_t r = 0; r < polls_.size(); ++r) {
      if (polls_[r].revents & ~POLLOUT) take_in(int(r));
    }
  }

  // Moves what has come from a rank to its inbox. The end of its stream is no failure before
  // something is wanted of it: a rank that has done all its work may close.
  void take_in(int from) {
    uint8_t buffer[1 << 16];
    const ssize_t count = recv(sockets_[from], buffer, sizeof(buffer), MSG_DONTWAIT);
    if (count > 0) {
      inboxes_[from].bytes.insert(inboxes_[from].bytes.end(), buffer, buffer + count);
    } else if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      ended_[from] = true;
      if (first_ended_ < 0) first_ended_ = from;
    }
  }

  // Where several ranks have gone, the first of them took the others along. Closing all sockets
  // tells those that still wait.
  void fail(int culprit) {
    mark_failed(first_ended_ < 0 ? culprit : first_ended_);
    for (int socket : sockets_) shutdown(socket, SHUT_RDWR);
  }

  const std::vector<int> sockets_;  // -1 for itself
  std::vector<Inbox> inboxes_;
  std::vector<char> ended_;  // ranks that send no more
  std::vector<float> others_part_;
  std::vector<pollfd> polls_;  // kept for its memory
  int first_ended_ = -1;
  std::atomic<int32_t> own_failed_{0};  // each rank finds out by itself
};

}  // namespace llmbuild
