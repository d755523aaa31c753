// The epolls of the threads that serve HTTP, each with what keeps its connections: see http_poll.h.
#pragma once

#include <sys/epoll.h>

namespace pytriton::guard {

// As epoll_ctl and epoll_wait, of any epoll.
int ControlEpoll(int epoll, int operation, int fd, epoll_event* event);
int WaitAtEpoll(int epoll, epoll_event* events, int most, int timeout_ms);

// A connection is about to be closed, or a new one has its number.
void ForgetInterest(int fd);

}  // namespace pytriton::guard
