// The epoll of a thread of the front end, against the kernel's: what is asked of both, and what both tell.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../guard/frontend/http_poll.h"
#include "check.h"

using pytriton::guard::HttpPoll;
using pytriton::guard::Interest;

namespace {

constexpr int kMost = 8;
// Of a wait that must not go on for ever; no test comes near it.
constexpr int kPatienceMs = 600'000;

std::array<Interest, 256> g_interests;
std::atomic<int> g_controls{0}, g_waits{0};
std::atomic<int> g_control_error{0};  // with which the next call fails

int Control(int epoll, int operation, int fd, epoll_event* event) {
  ++g_controls;
  if (const int error = g_control_error.exchange(0); error != 0) {
    errno = error;
    return -1;
  }
  return epoll_ctl(epoll, operation, fd, event);
}

int Wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  ++g_waits;
  return epoll_wait(epoll, events, most, timeout_ms);
}

Interest* Find(int fd) {
  return fd >= 0 && static_cast<size_t>(fd) < g_interests.size() ? &g_interests[static_cast<size_t>(fd)] : nullptr;
}

epoll_event Event(int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<uint64_t>(fd);
  return event;
}

// A front end with one thread, this one, and the kernel's answers to the same.
struct FrontEnd {
  FrontEnd() : poll(epoll_create1(0), {Control, Wait, Find, [](int, uint32_t) { return 0u; }}) { CHECK(poll.epoll() >= 0); }
  ~FrontEnd() { close(poll.epoll()); }

  int Ask(int operation, int fd, uint32_t events) {
    epoll_event event = Event(fd, events);
    Interest* const interest = Find(fd);
    if (interest->poll == nullptr && !HttpPoll::CanKeep(operation, fd, &event)) {
      return Control(poll.epoll(), operation, fd, &event);
    }
    return poll.Control(interest, operation, fd, &event, true);
  }
  int Add(int fd, uint32_t events) { return Ask(EPOLL_CTL_ADD, fd, events); }
  int Change(int fd, uint32_t events) { return Ask(EPOLL_CTL_MOD, fd, events); }
  int Remove(int fd) { return Ask(EPOLL_CTL_DEL, fd, 0); }
  void Close(int fd) {
    if (Find(fd)->poll != nullptr) poll.Forget(Find(fd), fd);
    close(fd);
  }

  // What one wait tells, by descriptor.
  std::map<int, uint32_t> Tell(int timeout_ms) {
    std::array<epoll_event, kMost> events{};
    const int count = poll.Wait(events.data(), kMost, timeout_ms);
    CHECK(count >= 0 || errno == EINTR);
    std::map<int, uint32_t> told;
    for (int i = 0; i < count; ++i) told[static_cast<int>(events[static_cast<size_t>(i)].data.u64)] = events[static_cast<size_t>(i)].events;
    return told;
  }

  HttpPoll poll;
};

using Told = std::map<int, uint32_t>;

std::pair<int, int> Pair() {
  std::array<int, 2> ends{};
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0);
  return {ends[0], ends[1]};
}

void Send(int fd) { CHECK(send(fd, "x", 1, MSG_NOSIGNAL) == 1); }

void Receive(int fd) {
  char byte = 0;
  CHECK(recv(fd, &byte, 1, 0) == 1);
}

// Writes until the system takes no more.
void Fill(int fd) {
  const std::string block(4096, 'x');
  while (send(fd, block.data(), block.size(), MSG_NOSIGNAL) > 0) {
  }
  CHECK(errno == EAGAIN);
}

void Drain(int fd) {
  std::array<char, 65536> block{};
  while (recv(fd, block.data(), block.size(), 0) > 0) {
  }
  CHECK(errno == EAGAIN);
}

void Requests() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  g_controls = g_waits = 0;
  for (int i = 0; i < 10; ++i) {
    Send(caller);
    CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLIN}}));
    Receive(connection);
    CHECK(front_end.Remove(connection) == 0);
    CHECK(front_end.Add(connection, EPOLLOUT) == 0);
    CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLOUT}}));
    Send(connection);
    CHECK(front_end.Remove(connection) == 0);
    CHECK(front_end.Add(connection, EPOLLIN) == 0);
  }
  CHECK(g_controls == 0);
  CHECK(g_waits == 10);
  CHECK(front_end.Tell(0).empty());
  front_end.Close(connection);
  CHECK(g_controls == 1);
  close(caller);
}

void CallersThatDoNotWait() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  CHECK(front_end.Remove(connection) == 0);
  Send(caller);
  g_controls = g_waits = 0;
  std::array<epoll_event, kMost> events{};
  CHECK(front_end.poll.Wait(events.data(), kMost, kPatienceMs) == -1 && errno == EINTR);
  CHECK(g_controls == 1);
  // Once: the kernel has forgotten the connection.
  CHECK(front_end.poll.Wait(events.data(), kMost, 0) == 0);
  // Told as soon as it is wanted.
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  CHECK(front_end.Tell(0) == Told({{connection, EPOLLIN}}));
  // Nothing of another connection is lost with it.
  const auto [other, other_caller] = Pair();
  CHECK(front_end.Add(other, EPOLLIN) == 0);
  CHECK(front_end.Remove(connection) == 0);
  close(caller);
  Send(other_caller);
  CHECK(front_end.Tell(0) == Told({{other, EPOLLIN}}));
  front_end.Close(connection);
  front_end.Close(other);
  close(other_caller);
}

void ResponsesThatDoNotFit() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  for (const uint32_t wanted : {uint32_t{EPOLLOUT}, uint32_t{EPOLLIN | EPOLLOUT}}) {
    CHECK(front_end.Add(connection, EPOLLIN) == 0);
    CHECK(front_end.Remove(connection) == 0);
    Fill(connection);
    CHECK(front_end.Add(connection, wanted) == 0);
    CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLOUT}}));
    // A try has shown that nothing can be written: the kernel says when.
    CHECK(front_end.Tell(0).empty());
    Drain(caller);
    CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLOUT}}));
    CHECK(front_end.Change(connection, EPOLLIN) == 0);
    CHECK(front_end.Tell(0).empty());
    CHECK(front_end.Remove(connection) == 0);
  }
  // Where the kernel can watch no more, it is said again.
  Fill(connection);
  CHECK(front_end.Add(connection, EPOLLOUT) == 0);
  CHECK(front_end.Tell(0) == Told({{connection, EPOLLOUT}}));
  g_control_error = ENOSPC;
  CHECK(front_end.Tell(0) == Told({{connection, EPOLLOUT}}));
  CHECK(front_end.Tell(0).empty());
  front_end.Close(connection);
  close(caller);
}

void MoreThanOneWaitCanTell() {
  FrontEnd front_end;
  std::vector<std::pair<int, int>> pairs;
  for (int i = 0; i < kMost + 3; ++i) {
    pairs.push_back(Pair());
    CHECK(front_end.Add(pairs.back().first, EPOLLOUT) == 0);
  }
  // Neither one that is removed nor one that is closed.
  CHECK(front_end.Remove(pairs[1].first) == 0);
  front_end.Close(pairs[2].first);
  Told told = front_end.Tell(0);
  CHECK(told.size() == kMost);
  for (const auto& one : told) CHECK(front_end.Remove(one.first) == 0);
  told.merge(front_end.Tell(0));
  CHECK(told.size() == kMost + 1 && told.count(pairs[1].first) == 0 && told.count(pairs[2].first) == 0);
  for (const auto& pair : pairs) {
    if (pair != pairs[2]) front_end.Close(pair.first);
    close(pair.second);
  }
}

void AnotherConnectionWithTheSameNumber() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  CHECK(front_end.Remove(connection) == 0);
  // A child has a copy for a while, as between fork and exec: closing does not remove it from the kernel's epoll.
  const int copy = dup(connection);
  front_end.Close(connection);
  close(caller);
  const auto [next, next_caller] = Pair();
  CHECK(next == connection);
  CHECK(front_end.Tell(0).empty());
  CHECK(front_end.Add(next, EPOLLIN) == 0);
  Send(next_caller);
  CHECK(front_end.Tell(0) == Told({{next, EPOLLIN}}));
  front_end.Close(next);
  close(next_caller);
  close(copy);
}

void OtherEvents() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  // What the front end does not ask for is the kernel's.
  CHECK(front_end.Add(connection, EPOLLIN | EPOLLET) == 0);
  CHECK(Find(connection)->poll == nullptr);
  CHECK(front_end.Remove(connection) == 0);
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  CHECK(Find(connection)->poll == &front_end.poll);
  CHECK(front_end.Change(connection, EPOLLIN | EPOLLRDHUP) == 0);
  CHECK(Find(connection)->poll == nullptr);
  shutdown(caller, SHUT_WR);
  CHECK(front_end.Tell(0) == Told({{connection, EPOLLIN | EPOLLRDHUP}}));
  CHECK(front_end.Remove(connection) == 0);
  // A pointer in place of the descriptor: nothing can be known of what is told.
  epoll_event event = Event(connection, EPOLLIN);
  event.data.ptr = &front_end;
  CHECK(!HttpPoll::CanKeep(EPOLL_CTL_ADD, connection, &event));
  // What the kernel refuses is not kept.
  g_control_error = ENOMEM;
  CHECK(front_end.Add(connection, EPOLLIN) == -1 && errno == ENOMEM);
  CHECK(Find(connection)->poll == nullptr);
  close(connection);
  close(caller);
}

void OtherThreads() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  CHECK(front_end.Remove(connection) == 0);
  const auto ask = [&, fd = connection](int operation, uint32_t events) {
    epoll_event event = Event(fd, events);
    std::thread([&] { CHECK(front_end.poll.Control(Find(fd), operation, fd, &event, false) == 0); }).join();
  };
  // The thread of this epoll may be asleep in the kernel, which has to wake it.
  ask(EPOLL_CTL_ADD, EPOLLOUT);
  std::array<epoll_event, 1> events{};
  CHECK(epoll_wait(front_end.poll.epoll(), events.data(), 1, 0) == 1 && events[0].events == EPOLLOUT);
  ask(EPOLL_CTL_DEL, 0);
  CHECK(front_end.Tell(0).empty());
  std::thread sleeper([&, fd = connection] { CHECK(front_end.Tell(kPatienceMs) == Told({{fd, EPOLLOUT}})); });
  ask(EPOLL_CTL_ADD, EPOLLOUT);
  sleeper.join();
  // Closed by whoever is done with it, while the thread goes on.
  std::atomic<bool> over{false};
  std::thread waiter([&] {
    while (!over) front_end.Tell(0);
  });
  for (int i = 0; i < 2000; ++i) {
    const auto [one, its_caller] = Pair();
    epoll_event event = Event(one, EPOLLIN | EPOLLOUT);
    CHECK(front_end.poll.Control(Find(one), EPOLL_CTL_ADD, one, &event, false) == 0);
    Send(its_caller);
    front_end.Close(one);
    close(its_caller);
  }
  over = true;
  waiter.join();
  front_end.Close(connection);
  close(caller);
}

// The guard holds bytes back: a connection is said to be readable whatever the kernel has, as soon as it is wanted.
void WhatTheKernelHasNot() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  for (int i = 0; i < 2; ++i) front_end.poll.SayReadable(Find(connection), connection);
  CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLIN}}));
  CHECK(front_end.Tell(0).empty());
  CHECK(front_end.Remove(connection) == 0);
  front_end.poll.SayReadable(Find(connection), connection);
  CHECK(front_end.Tell(0).empty());
  CHECK(front_end.Add(connection, EPOLLOUT) == 0);
  CHECK(front_end.Tell(0) == Told({{connection, EPOLLOUT}}));
  CHECK(front_end.Change(connection, EPOLLIN) == 0);
  // Others are not forgotten meanwhile.
  const auto [other, other_caller] = Pair();
  CHECK(front_end.Add(other, EPOLLIN) == 0);
  Send(other_caller);
  CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLIN}, {other, EPOLLIN}}));
  // Another thread that wants it wakes this one.
  CHECK(front_end.Remove(other) == 0);
  CHECK(front_end.Remove(connection) == 0);
  front_end.poll.SayReadable(Find(connection), connection);
  std::thread sleeper([&, fd = connection] {
    std::array<epoll_event, kMost> events{};
    const auto is_it = [fd](const epoll_event& event) {
      return event.data.u64 == static_cast<uint64_t>(fd) && event.events == EPOLLIN;
    };
    while (std::none_of(events.begin(), events.end(), is_it)) {
      events = {};
      CHECK(front_end.poll.Wait(events.data(), kMost, kPatienceMs) > 0 || errno == EINTR);
    }
  });
  epoll_event event = Event(connection, EPOLLIN);
  CHECK(front_end.poll.Control(Find(connection), EPOLL_CTL_ADD, connection, &event, false) == 0);
  sleeper.join();
  // What is closed is not said, nor another one with its number.
  front_end.poll.SayReadable(Find(connection), connection);
  front_end.Close(connection);
  close(caller);
  CHECK(front_end.Tell(0).empty());
  front_end.Close(other);
  close(other_caller);
}

void WhileAnAnswerIsWritten() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  Send(caller);
  front_end.poll.PauseReading(Find(connection), connection);
  CHECK(front_end.Tell(0).empty());
  // Nor where the front end asks for it again.
  CHECK(front_end.Change(connection, EPOLLIN) == 0);
  CHECK(front_end.Tell(0).empty());
  CHECK(front_end.Change(connection, EPOLLIN | EPOLLOUT) == 0);
  CHECK(front_end.Tell(0) == Told({{connection, EPOLLOUT}}));
  CHECK(front_end.Change(connection, EPOLLIN) == 0);
  front_end.poll.ResumeReading(Find(connection), connection);
  CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLIN}}));
  front_end.poll.PauseReading(Find(connection), connection);
  CHECK(front_end.Tell(0).empty());
  // Where the kernel does not take it, it is read at once.
  g_control_error = ENOMEM;
  front_end.poll.ResumeReading(Find(connection), connection);
  CHECK(front_end.Tell(0) == Told({{connection, EPOLLIN}}));
  front_end.poll.PauseReading(Find(connection), connection);
  CHECK(front_end.Tell(0).empty());
  // The front end learns that its caller leaves when it reads.
  close(caller);
  CHECK((front_end.Tell(kPatienceMs)[connection] & EPOLLIN) != 0);
  front_end.Close(connection);
}

// What was said of a connection that the kernel alone has, or that was never added, is not said of another one.
void WhatIsLeftOfAConnection() {
  FrontEnd front_end;
  const auto [connection, caller] = Pair();
  Interest* const interest = Find(connection);
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  front_end.poll.PauseReading(interest, connection);
  CHECK(front_end.Change(connection, EPOLLIN | EPOLLET) == 0 && interest->poll == nullptr);
  CHECK(!interest->is_paused);
  CHECK(front_end.Remove(connection) == 0);
  g_control_error = ENOSPC;
  interest->is_paused = interest->is_readable = true;
  CHECK(front_end.Add(connection, EPOLLIN) == -1 && interest->poll == nullptr && !interest->is_paused);
  interest->Begin();
  CHECK(!interest->is_readable && interest->wanted == 0 && interest->watched == 0);
  Send(caller);
  CHECK(front_end.Add(connection, EPOLLIN) == 0);
  CHECK(front_end.Tell(kPatienceMs) == Told({{connection, EPOLLIN}}));
  // Of one that is kept nothing is forgotten.
  interest->Begin();
  CHECK(interest->wanted == EPOLLIN && interest->watched == EPOLLIN);
  front_end.Close(connection);
  close(caller);
}

// Anything in any order, of several connections; the kernel's epoll is asked for the same.
void Anything(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&random](unsigned most) { return static_cast<size_t>(random() % most); };
  FrontEnd front_end;
  const int kernel = epoll_create1(0);
  std::vector<std::pair<int, int>> pairs(4);
  for (auto& pair : pairs) pair = Pair();
  std::map<int, uint32_t> wanted;
  constexpr std::array<uint32_t, 3> kEvents = {EPOLLIN, EPOLLOUT, EPOLLIN | EPOLLOUT};
  constexpr std::array<int, 3> kOperations = {EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_DEL};
  for (int step = 0; step < 3000; ++step) {
    auto& [connection, caller] = pairs[below(4)];
    switch (below(10)) {
      case 0:
        send(caller, "x", 1, MSG_NOSIGNAL);
        break;
      case 1:
        char byte;
        recv(connection, &byte, 1, 0);
        break;
      case 2:
        if (below(4) == 0) {
          const std::string block(4096, 'x');
          while (send(connection, block.data(), block.size(), MSG_NOSIGNAL) > 0) {
          }
        }
        break;
      case 3:
        if (below(4) == 0) Drain(caller);
        break;
      case 4:
        if (below(8) == 0) {
          wanted.erase(connection);
          front_end.Close(connection);
          close(caller);
          std::tie(connection, caller) = Pair();
        }
        break;
      case 5: {
        Told told = front_end.Tell(0);
        // At first what may be written, then what the kernel says.
        for (int i = 0; i < 3; ++i) {
          for (const auto& [fd, events] : front_end.Tell(0)) told[fd] |= events;
        }
        std::array<epoll_event, kMost> events{};
        const int count = epoll_wait(kernel, events.data(), kMost, 0);
        Told expected;
        for (int i = 0; i < count; ++i) expected[static_cast<int>(events[static_cast<size_t>(i)].data.u64)] = events[static_cast<size_t>(i)].events;
        for (const auto& [fd, what] : expected) CHECK((told[fd] & what) == what);
        for (const auto& [fd, what] : told) CHECK(what == 0 || (what & ~(expected[fd] | EPOLLOUT)) == 0);
        for (const auto& [fd, what] : told) CHECK((what & EPOLLOUT) == 0 || (wanted[fd] & EPOLLOUT) != 0);
        break;
      }
      default: {
        const int operation = kOperations[below(3)];
        const uint32_t events = kEvents[below(3)];
        epoll_event event = Event(connection, events);
        errno = 0;
        const int kernels = epoll_ctl(kernel, operation, connection, &event);
        const int kernels_error = errno;
        errno = 0;
        const int ours = front_end.Ask(operation, connection, events);
        CHECK(ours == kernels && errno == kernels_error);
        if (ours == 0) wanted[connection] = operation == EPOLL_CTL_DEL ? 0 : events;
      }
    }
  }
  for (const auto& [connection, caller] : pairs) {
    front_end.Close(connection);
    close(caller);
  }
  close(kernel);
}

}  // namespace

int main() {
  Requests();
  CallersThatDoNotWait();
  ResponsesThatDoNotFit();
  MoreThanOneWaitCanTell();
  AnotherConnectionWithTheSameNumber();
  OtherEvents();
  OtherThreads();
  WhatTheKernelHasNot();
  WhileAnAnswerIsWritten();
  WhatIsLeftOfAConnection();
  for (unsigned seed = 0; seed < 100; ++seed) Anything(seed);
  for (const Interest& interest : g_interests) CHECK(interest.poll == nullptr);
  return 0;
}
