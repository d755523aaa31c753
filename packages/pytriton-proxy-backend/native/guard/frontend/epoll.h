// The epolls of the threads that serve HTTP, each with the object that keeps its connections: see http_poll.h.
#pragma once

#include <sys/epoll.h>

namespace pytriton::guard {

// Work like epoll_ctl and epoll_wait, for any epoll.
int ControlEpoll(int epoll, int operation, int fd, epoll_event* event);
int WaitAtEpoll(int epoll, epoll_event* events, int most, int timeout_ms);
// Whether this thread waits by `WaitEpoll`, without which nobody notices that callers leave.
bool WaitsHere();

// Whether this thread can be made to read a connection for which the kernel reports nothing. If not, the guard holds no
// whole requests back, and the functions below do nothing; see http_poll.h.
bool CanSayReadable(int fd);
void SayReadable(int fd);
void PauseReading(int fd);
void ResumeReading(int fd);

// A connection is about to be closed, or a new one has its descriptor.
void ForgetInterest(int fd);

}  // namespace pytriton::guard
