// What becomes of the server's sockets, for each part of the guard that cares: where it listens, whom it accepts, what ends.
#pragma once

#include <sys/socket.h>

namespace pytriton::guard {

// As the functions of the system, of any descriptor; Accept as accept4.
int Accept(int listener, sockaddr* address, socklen_t* length, int flags);
int Bind(int fd, const sockaddr* address, socklen_t length);
int Listen(int fd, int backlog);
int Shutdown(int fd, int how);
int Close(int fd);

}  // namespace pytriton::guard
