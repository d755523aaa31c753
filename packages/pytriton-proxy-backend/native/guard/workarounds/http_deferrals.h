// What other threads of the server ask the threads of its HTTP front end to do, such as to send a part of an answer.
//
// Bug: libevhtp 1.2.18 writes a message of 17 bytes for each of these to a socket that holds about 278 of them, and
// does not check whether there was room. If a thread was late, a stream lost its last parts, or its end, for which its
// caller then waited for ever. Here a message without room is kept until the thread has read something.
// Until: no version of tritonserver is known to do better.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>

namespace pytriton::guard {

class HttpDeferrals {
 public:
  using Send = ssize_t (*)(int, const void*, size_t, int);

  // Takes the two ends of a new socket; libevhtp reads the first one.
  void OnPair(int reader, int writer);

  void OnClose(int fd);

  // Whether a message that is written to `fd` is for a thread of the front end. Sockets of other users may have other
  // messages.
  bool IsTo(int fd, size_t size) const { return size == kMessageSize && Find(writers_, fd) != nullptr; }

  // Writes a message, or keeps it: like `send` with such a descriptor, except that a lack of room is no error.
  ssize_t Write(int fd, const void* data, size_t size, int flags, Send next);

  // Whether messages are read from `fd`.
  bool IsReader(int fd) const { return Find(readers_, fd) != nullptr; }

  // Writes the kept messages for which there is room. To be called after a message was read.
  void OnRead(int fd, Send next);

 private:
  static constexpr size_t kMessageSize = 17;
  // The highest descriptor. The threads start with the server, before there are connections, so their descriptors are
  // low.
  static constexpr size_t kMost = 4096;

  struct Pipe {
    explicit Pipe(int it) : writer(it) {}

    const int writer;
    std::mutex mutex;
    std::deque<std::string> kept;
    std::atomic<bool> has_kept{false};
  };
  using Pipes = std::array<std::atomic<Pipe*>, kMost>;

  static Pipe* Find(const Pipes& pipes, int fd) {
    return fd < 0 || static_cast<size_t>(fd) >= kMost ? nullptr
                                                      : pipes[static_cast<size_t>(fd)].load(std::memory_order_acquire);
  }

  std::mutex mutex_;
  // One for each thread. None is removed, because another thread may be using one that is closed.
  std::deque<Pipe> pipes_;
  // Writes the kept messages for which there is room. Called with the lock.
  static void Flush(Pipe* pipe, Send next);

  Pipes readers_{};
  Pipes writers_{};
};

// The messages of this server. Never destroyed, because threads run until the process ends.
HttpDeferrals& Deferrals();

}  // namespace pytriton::guard
