#include "epoll.h"

#include <sys/socket.h>

#include "../answers/responses.h"
#include "../hooks.h"
#include "../in_force.h"
#include "../refuse/held_back.h"
#include "http_poll.h"

namespace pytriton::guard {
namespace {

// The epoll for which this thread waited last, and the object that keeps the connections of one; null at first.
thread_local int t_epoll = -1;
thread_local HttpPoll* t_http_poll = nullptr;

Interest* FindInterest(int fd) {
  Guard* guard = Active();
  return guard == nullptr ? nullptr : guard->connections.FindInterest(fd);
}

int NextEpollControl(int epoll, int operation, int fd, epoll_event* event) {
  const auto next = NEXT(epoll_ctl);
  return next(epoll, operation, fd, event);
}

int NextEpollWait(int epoll, epoll_event* events, int most, int timeout_ms) {
  const auto next = NEXT(epoll_wait);
  return next(epoll, events, most, timeout_ms);
}

// Handles what came of a connection whose request is being served. A caller that has closed its sending side counts as
// gone, as in most servers.
uint32_t OnUnwanted(int fd, uint32_t events) {
  char byte;
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0 && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0) {
    return EPOLLRDHUP;
  }
  Guard* const guard = Active();
  const Connection* const connection = guard->connections.FindKnown(fd);
  // The guard itself has ended the reading side of a connection that it refused behind a request that is being served.
  if (connection != nullptr && connection->is_refused) return 0;
  if (connection != nullptr) CountLeft(*connection);
  guard->callers.OnLeave(guard->connections.TakeRequest(fd), fd);
  return 0;
}

}  // namespace

int ControlEpoll(int epoll, int operation, int fd, epoll_event* event) {
  Interest* interest = FindInterest(fd);
  if (interest != nullptr && Active()->limits.frontend == 0) {
    if (t_reads_http && t_epoll == epoll) t_handled = Active()->connections.NameOf(fd);
    return NextEpollControl(epoll, operation, fd, event);
  }
  HttpPoll* poll = interest == nullptr ? nullptr : interest->poll.load(std::memory_order_acquire);
  if (poll == nullptr && interest != nullptr && t_epoll == epoll && HttpPoll::CanKeep(operation, fd, event)) {
    if (t_http_poll == nullptr) t_http_poll = new HttpPoll(epoll, {NextEpollControl, NextEpollWait, FindInterest, OnUnwanted});
    poll = t_http_poll;
  }
  if (poll == nullptr || poll->epoll() != epoll) return NextEpollControl(epoll, operation, fd, event);
  if (poll == t_http_poll) t_handled = Active()->connections.NameOf(fd);
  return poll->Control(interest, operation, fd, event, poll == t_http_poll);
}

bool WaitsHere() { return t_epoll >= 0; }

int WaitAtEpoll(int epoll, epoll_event* events, int most, int timeout_ms) {
  t_epoll = epoll;
  if (t_reads_http && Active() != nullptr) {
    EndLateHeads();
    timeout_ms = TimeoutOfHeads(timeout_ms);
  }
  HttpPoll* const poll = Active() == nullptr ? nullptr : t_http_poll;
  if (poll == nullptr || poll->epoll() != epoll) return NextEpollWait(epoll, events, most, timeout_ms);
  return poll->Wait(events, most, timeout_ms);
}

namespace {

// Returns the object that keeps a connection in the epoll of this thread; null if only the kernel does.
HttpPoll* PollOf(const Interest* interest) {
  HttpPoll* const poll = interest == nullptr ? nullptr : interest->poll.load(std::memory_order_acquire);
  return poll == t_http_poll ? poll : nullptr;
}

}  // namespace

bool CanSayReadable(int fd) { return PollOf(FindInterest(fd)) != nullptr; }

void SayReadable(int fd) {
  Interest* const interest = FindInterest(fd);
  if (HttpPoll* const poll = PollOf(interest); poll != nullptr) poll->SayReadable(interest, fd);
}

void PauseReading(int fd) {
  Interest* const interest = FindInterest(fd);
  if (HttpPoll* const poll = PollOf(interest); poll != nullptr) poll->PauseReading(interest, fd);
}

void ResumeReading(int fd) {
  Interest* const interest = FindInterest(fd);
  if (HttpPoll* const poll = PollOf(interest); poll != nullptr) poll->ResumeReading(interest, fd);
}

void ForgetInterest(int fd) {
  Interest* interest = FindInterest(fd);
  HttpPoll* poll = interest == nullptr ? nullptr : interest->poll.load(std::memory_order_acquire);
  if (poll != nullptr) poll->Forget(interest, fd);
}

}  // namespace pytriton::guard
