// The epolls of the threads that serve HTTP, each with what keeps its connections: see http_poll.h.
#pragma once

#include <sys/epoll.h>

namespace pytriton::guard {

// As epoll_ctl and epoll_wait, of any epoll.
int ControlEpoll(int epoll, int operation, int fd, epoll_event* event);
int WaitAtEpoll(int epoll, epoll_event* events, int most, int timeout_ms);
// Whether this thread waits by the latter, without which nobody sees that callers leave.
bool WaitsHere();

// Whether this thread can be told that a connection is to be read whatever the kernel has of it. Where it cannot, the guard
// holds no whole requests back. The others do nothing then; see http_poll.h.
bool CanSayReadable(int fd);
void SayReadable(int fd);
void PauseReading(int fd);
void ResumeReading(int fd);

// A connection is about to be closed, or a new one has its number.
void ForgetInterest(int fd);

}  // namespace pytriton::guard
