// Handles the server's sockets for all parts of the guard: where it listens, whom it accepts, and what is closed.
#pragma once

#include <sys/socket.h>

namespace pytriton::guard {

// Work like the system's functions, for any descriptor; Accept works like accept4.
int Accept(int listener, sockaddr* address, socklen_t* length, int flags);
int Bind(int fd, const sockaddr* address, socklen_t length);
int Listen(int fd, int backlog);
int Shutdown(int fd, int how);
int Close(int fd);

}  // namespace pytriton::guard
