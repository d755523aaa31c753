#include "http_poll.h"

#include <algorithm>
#include <cerrno>

namespace pytriton::guard {
namespace {

bool IsPlain(int fd, const epoll_event* event) {
  return event != nullptr && event->events != 0 && (event->events & ~uint32_t{EPOLLIN | EPOLLOUT}) == 0 &&
         event->data.u64 == static_cast<uint64_t>(fd);
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
    // Nothing that the front end is known to ask for: the kernel's alone from here on.
    if (Watch(interest, fd, 0) != 0) return -1;
    Want(interest, 0);
    interest->poll.store(nullptr, std::memory_order_release);
    return system_.control(epoll_, EPOLL_CTL_ADD, fd, event);
  }
  const bool is_said = is_own_thread && (event->events & EPOLLOUT) != 0;
  if (!is_said && Watch(interest, fd, event->events) != 0) {
    if (!is_added) interest->poll.store(nullptr, std::memory_order_release);
    return -1;
  }
  Want(interest, event->events);
  if (is_said) SayWritable(interest, fd);
  return 0;
}

int HttpPoll::Wait(epoll_event* events, int most, int timeout_ms) {
  const int told = TellWritable(events, most);
  if (told > 0) return told;
  const int count = system_.wait(epoll_, events, most, timeout_ms);
  if (count <= 0) return count;
  const std::lock_guard<std::mutex> lock(mutex_);
  const epoll_event* const end = std::remove_if(events, events + count, [this](const epoll_event& event) {
    const int fd = static_cast<int>(event.data.u64);
    Interest* const interest = event.data.u64 == static_cast<uint64_t>(fd) ? Find(fd) : nullptr;
    if (interest == nullptr || interest->wanted != 0) return false;
    // Of a caller that sends more or leaves before it has its response: the front end hears of it when it reads again.
    Watch(interest, fd, system_.on_unwanted(fd, event.events));
    return true;
  });
  return end == events ? Fail(EINTR) : static_cast<int>(end - events);
}

void HttpPoll::Forget(Interest* interest, int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (interest->poll.load(std::memory_order_relaxed) != this) return;
  Watch(interest, fd, 0);
  interest->watched = 0;
  Want(interest, 0);
  interest->poll.store(nullptr, std::memory_order_release);
}

// What is wanted of a connection that is kept here; null for any other descriptor.
Interest* HttpPoll::Find(int fd) const {
  Interest* const interest = system_.find(fd);
  return interest != nullptr && interest->poll.load(std::memory_order_acquire) == this ? interest : nullptr;
}

// Has the kernel watch for these events and no others.
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

// Returns how many connections were said to be writable.
int HttpPoll::TellWritable(epoll_event* events, int most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int fd : said_) {
    Interest* const interest = Find(fd);
    if (interest == nullptr || interest->is_to_be_said || (interest->wanted & EPOLLOUT) == 0) continue;
    // The system did not take all. Where the kernel can watch no more, it is tried until it does.
    if (Watch(interest, fd, interest->wanted) != 0) SayWritable(interest, fd);
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

}  // namespace pytriton::guard
