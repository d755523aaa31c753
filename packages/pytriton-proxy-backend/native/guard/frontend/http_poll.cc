#include "http_poll.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace pytriton::guard {
namespace {

bool IsPlain(int fd, const epoll_event* event) {
  return event != nullptr && event->events != 0 && (event->events & ~uint32_t{EPOLLIN | EPOLLOUT}) == 0 &&
         event->data.u64 == static_cast<uint64_t>(fd);
}

// The events for which the kernel watches, out of those that the front end wants.
uint32_t Allowed(const Interest& interest, uint32_t wanted) {
  return interest.is_paused ? (wanted & ~uint32_t{EPOLLIN}) | EPOLLRDHUP : wanted;
}

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

bool HttpPoll::CanKeep(int operation, int fd, const epoll_event* event) {
  return operation == EPOLL_CTL_ADD && IsPlain(fd, event);
}

int HttpPoll::Control(Interest* interest, int operation, int fd, epoll_event* event, bool is_own_thread) {
  const std::lock_guard<std::mutex> lock(mutex_);
  interest->poll.store(this, std::memory_order_release);
  const bool is_added = interest->wanted != 0;
  if (operation == EPOLL_CTL_ADD ? is_added : !is_added) return Fail(is_added ? EEXIST : ENOENT);
  if (operation == EPOLL_CTL_DEL) {
    Want(interest, 0);
    return 0;
  }
  if (!IsPlain(fd, event)) {
    // The front end asks for something unknown, so only the kernel keeps this connection from now on.
    if (Watch(interest, fd, 0) != 0) return -1;
    Want(interest, 0);
    interest->is_paused = false;
    interest->poll.store(nullptr, std::memory_order_release);
    return system_.control(epoll_, EPOLL_CTL_ADD, fd, event);
  }
  const bool is_said = is_own_thread && (event->events & EPOLLOUT) != 0;
  const bool is_readable = interest->is_readable && (event->events & EPOLLIN) != 0;
  // The thread of this epoll may be asleep; that the connection can be written wakes it.
  const uint32_t wakes = is_readable && !is_own_thread ? uint32_t{EPOLLOUT} : 0;
  if (!is_said && Watch(interest, fd, Allowed(*interest, event->events) | wakes) != 0) {
    if (!is_added) {
      interest->is_paused = false;
      interest->poll.store(nullptr, std::memory_order_release);
    }
    return -1;
  }
  Want(interest, event->events);
  if (is_said) SayWritable(interest, fd);
  if (is_readable) to_read_.push_back(fd);
  return 0;
}

int HttpPoll::Wait(epoll_event* events, int most, int timeout_ms) {
  int readable = 0;
  int told = Tell(events, most, &readable);
  // The kernel is asked as well, so that callers that have sent many requests ahead are not served before all others.
  if (told > 0 && (readable == 0 || told == most)) return told;
  const int count = system_.wait(epoll_, events + told, most - told, readable > 0 ? 0 : timeout_ms);
  if (count <= 0) return told > 0 ? told : count;
  told += Filter(events + told, count);
  return told == 0 ? Fail(EINTR) : told;
}

// Removes from the kernel's events those that the front end does not want; returns how many are left.
int HttpPoll::Filter(epoll_event* events, int count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const epoll_event* const end = std::remove_if(events, events + count, [this](epoll_event& event) {
    const int fd = static_cast<int>(event.data.u64);
    Interest* const interest = event.data.u64 == static_cast<uint64_t>(fd) ? Find(fd) : nullptr;
    if (interest == nullptr) return false;
    if (interest->wanted != 0) {
      // The front end learns when it reads that a caller has left.
      if ((event.events & EPOLLRDHUP) != 0) event.events = (event.events & ~uint32_t{EPOLLRDHUP}) | EPOLLIN;
      return false;
    }
    // A caller sends more, or leaves, before it has its response; the front end learns this when it reads again.
    Watch(interest, fd, system_.on_unwanted(fd, event.events));
    return true;
  });
  return static_cast<int>(end - events);
}

void HttpPoll::SayReadable(Interest* interest, int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(interest->is_readable, true)) return;
  if ((interest->wanted & EPOLLIN) != 0) to_read_.push_back(fd);
}

void HttpPoll::PauseReading(Interest* interest, int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  interest->is_paused = true;
  // The kernel does not watch a connection that will be reported as writable.
  if (interest->watched != 0) Watch(interest, fd, Allowed(*interest, interest->watched));
}

void HttpPoll::ResumeReading(Interest* interest, int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  interest->is_paused = false;
  if ((interest->wanted & EPOLLIN) == 0) return;
  if (Watch(interest, fd, (interest->watched & ~uint32_t{EPOLLRDHUP}) | EPOLLIN) == 0) return;
  // The kernel will not report it, so it is read at once.
  if (!std::exchange(interest->is_readable, true)) to_read_.push_back(fd);
}

void HttpPoll::Forget(Interest* interest, int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (interest->poll.load(std::memory_order_relaxed) != this) return;
  Watch(interest, fd, 0);
  interest->watched = 0;
  interest->is_readable = false;
  interest->is_paused = false;
  Want(interest, 0);
  interest->poll.store(nullptr, std::memory_order_release);
}

// Returns what is wanted of a connection that is kept here; null for any other descriptor.
Interest* HttpPoll::Find(int fd) const {
  Interest* const interest = system_.find(fd);
  return interest != nullptr && interest->poll.load(std::memory_order_acquire) == this ? interest : nullptr;
}

// Makes the kernel watch for these events and no others.
int HttpPoll::Watch(Interest* interest, int fd, uint32_t events) const {
  if (events == interest->watched) return 0;
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<uint64_t>(fd);
  const int operation = interest->watched == 0 ? EPOLL_CTL_ADD : events == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
  const int result = system_.control(epoll_, operation, fd, &event);
  if (result == 0) interest->watched = events;
  return result;
}

void HttpPoll::Want(Interest* interest, uint32_t events) {
  interest->wanted = events;
  interest->is_to_be_said = false;
}

void HttpPoll::SayWritable(Interest* interest, int fd) {
  interest->is_to_be_said = true;
  to_say_.push_back(fd);
}

// Reports connections that can be written and read; returns how many, `readable` of which can be read.
int HttpPoll::Tell(epoll_event* events, int most, int* readable) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int writable = TellWritable(events, most);
  if (!to_read_.empty()) *readable = TellReadable(events + writable, most - writable);
  return writable + *readable;
}

int HttpPoll::TellWritable(epoll_event* events, int most) {
  for (const int fd : said_) {
    Interest* const interest = Find(fd);
    if (interest == nullptr || interest->is_to_be_said || (interest->wanted & EPOLLOUT) == 0) continue;
    // The system did not take everything. If the kernel cannot watch more, the connection is reported again until it
    // can.
    if (Watch(interest, fd, Allowed(*interest, interest->wanted)) != 0) SayWritable(interest, fd);
  }
  said_.clear();
  int told = 0;
  auto next = to_say_.begin();
  for (; next != to_say_.end() && told < most; ++next) {
    Interest* const interest = Find(*next);
    if (interest == nullptr || !interest->is_to_be_said) continue;
    interest->is_to_be_said = false;
    said_.push_back(*next);
    events[told].events = EPOLLOUT;
    events[told++].data.u64 = static_cast<uint64_t>(*next);
  }
  to_say_.erase(to_say_.begin(), next);
  return told;
}

// Reports connections as readable; one that the front end does not want now is reported when it does.
int HttpPoll::TellReadable(epoll_event* events, int most) {
  int told = 0;
  auto next = to_read_.begin();
  for (; next != to_read_.end() && told < most; ++next) {
    Interest* const interest = Find(*next);
    if (interest == nullptr || !interest->is_readable || (interest->wanted & EPOLLIN) == 0) continue;
    interest->is_readable = false;
    events[told].events = EPOLLIN;
    events[told++].data.u64 = static_cast<uint64_t>(*next);
  }
  to_read_.erase(to_read_.begin(), next);
  return told;
}

}  // namespace pytriton::guard
