// Lets epoll watch the HTTP front end's connections with fewer system calls.
//
// For each request the front end (libevent 2.1) adds its connection to an epoll twice, to read the request and to write
// the response, and removes it each time. Here the connection stays in the kernel's epoll: a caller that waits for its
// response sends nothing, so the epoll reports nothing. And most responses fit into what the system takes at once, so a
// connection is reported as writable without asking the kernel, until a write has shown that it is not.
//
// This also lets the guard give the front end one request at a time: a connection is reported as readable while the
// guard holds bytes of it back, and is not while an answer is being written.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace pytriton::guard {

class HttpPoll;

// What the front end wants of a connection, and what the kernel watches. Guarded by the lock of `poll`, except for
// `poll` itself.
struct Interest {
  std::atomic<HttpPoll*> poll{nullptr};  // the object that keeps it; null if only the kernel does
  uint32_t wanted = 0;                   // by the front end; 0 if it has removed the connection, or not added it
  uint32_t watched = 0;                  // by the kernel
  bool is_to_be_said = false;            // the next wait reports it as writable
  bool is_readable = false;              // to be reported as soon as the front end wants it, whatever the kernel says
  bool is_paused = false;                // nothing is read from it; that its caller leaves is still reported

  // Forgets everything about an earlier connection, if no object keeps it.
  void Begin() {
    if (poll.load(std::memory_order_acquire) != nullptr) return;
    wanted = watched = 0;
    is_to_be_said = is_readable = is_paused = false;
  }
};

// The epoll of one thread of the front end, which waits for it. It is never destroyed, because the thread runs nearly
// as long as the process.
class HttpPoll {
 public:
  // The system's functions, and one that returns what is wanted of a connection; null for any other descriptor. The
  // last one is told what came of a connection while nothing was wanted, and returns what else to watch for.
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
  // Works like epoll_ctl for a connection that is kept here, or can be. What other threads want is passed to the kernel
  // at once, because the thread of this epoll may be asleep.
  int Control(Interest* interest, int operation, int fd, epoll_event* event, bool is_own_thread);
  // Works as epoll_wait, in the thread of this epoll. Fails with EINTR if it turns out that there is nothing to report.
  int Wait(epoll_event* events, int most, int timeout_ms);
  // Lets one of the next waits report that a connection can be read. To be called in the thread of this epoll, like the
  // two below.
  void SayReadable(Interest* interest, int fd);
  // Lets the kernel report of a connection only that its caller leaves, until it is resumed.
  void PauseReading(Interest* interest, int fd);
  void ResumeReading(Interest* interest, int fd);
  // Forgets a connection that is about to be closed, or whose descriptor has a new connection.
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
  std::vector<int> to_say_;  // connections that the next wait reports as writable
  std::vector<int> said_;    // those that the last wait has reported
  std::vector<int> to_read_;  // connections that the next wait reports as readable, if they are wanted
};

}  // namespace pytriton::guard
