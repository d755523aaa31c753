// What the HTTP front end has epoll look after, in fewer system calls.
//
// For each request the front end (libevent 2.1) adds its connection to an epoll twice, to read the request and to write
// the response, and removes it each time. Here the kernel's epoll keeps the connection meanwhile: a caller that waits for
// its response sends nothing, so nothing is told of it. And a response mostly fits into what the system takes at once, so
// a connection that is to be written is said to be writable, until a try has shown that it is not.
//
// It also lets the guard give the front end one request at a time: a connection is said to be readable while the guard holds
// bytes of it back, and is not while an answer is written.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace pytriton::guard {

class HttpPoll;

// What is wanted of a connection, and what the kernel knows of that. All but `poll` is for who has the lock of that.
struct Interest {
  std::atomic<HttpPoll*> poll{nullptr};  // that keeps it; null: it is the kernel's alone
  uint32_t wanted = 0;                   // by the front end; 0: it has removed the connection, or not added it
  uint32_t watched = 0;                  // by the kernel
  bool is_to_be_said = false;            // to be writable, by the next wait
  bool is_readable = false;              // whatever the kernel has: to be said as soon as the front end wants it
  bool is_paused = false;                // nothing of it is to be read; that its caller leaves is said all the same

  // Forgets all that is left of a connection before, where none keeps it.
  void Begin() {
    if (poll.load(std::memory_order_acquire) != nullptr) return;
    wanted = watched = 0;
    is_to_be_said = is_readable = is_paused = false;
  }
};

// The epoll of a thread of the front end, which waits at it. Lasts as long as the process, as that thread does nearly.
class HttpPoll {
 public:
  // The functions that this stands in front of, and one that returns what is wanted of a connection; null for any other
  // descriptor. The last is told of what came of a connection while nothing was wanted, and returns what else to watch for.
  struct System {
    int (*control)(int epoll, int operation, int fd, epoll_event* event);
    int (*wait)(int epoll, epoll_event* events, int most, int timeout_ms);
    Interest* (*find)(int fd);
    uint32_t (*on_unwanted)(int fd, uint32_t events);
  };

  HttpPoll(int epoll, const System& system) : epoll_(epoll), system_(system) {}

  int epoll() const { return epoll_; }

  // Whether a connection can be kept from this call of epoll_ctl on.
  static bool CanKeep(int operation, int fd, const epoll_event* event);
  // As epoll_ctl, for a connection that is kept here, or can be. What other threads want the kernel is told at once: the
  // thread of this epoll may be asleep.
  int Control(Interest* interest, int operation, int fd, epoll_event* event, bool is_own_thread);
  // Works as epoll_wait, in the thread of this epoll. Fails with EINTR if it turns out that there is nothing to report.
  int Wait(epoll_event* events, int most, int timeout_ms);
  // Says by a next wait that a connection can be read. In the thread of this epoll, as the two below.
  void SayReadable(Interest* interest, int fd);
  // Has the kernel tell of a connection only that its caller leaves, until it is resumed.
  void PauseReading(Interest* interest, int fd);
  void ResumeReading(Interest* interest, int fd);
  // Forgets a connection: it is about to be closed, or another one has its number.
  void Forget(Interest* interest, int fd);

 private:
  Interest* Find(int fd) const;
  int Watch(Interest* interest, int fd, uint32_t events) const;
  int Filter(epoll_event* events, int count);
  void SayWritable(Interest* interest, int fd);
  void Want(Interest* interest, uint32_t events);
  int Tell(epoll_event* events, int most, int* readable);
  int TellWritable(epoll_event* events, int most);
  int TellReadable(epoll_event* events, int most);

  const int epoll_;
  const System system_;
  std::mutex mutex_;
  std::vector<int> to_say_;  // connections that the next wait says are writable
  std::vector<int> said_;    // of which the last one has said so
  std::vector<int> to_read_;  // connections that the next wait says are readable, where they are wanted
};

}  // namespace pytriton::guard
