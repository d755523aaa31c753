// Connections over gRPC to Triton's own front end: callers of a server that is replaced are told to open another one.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

namespace pytriton::guard {

// As sendmsg and recvmsg, of any descriptor.
ssize_t SendGrpc(int fd, const msghdr* message, int flags);
ssize_t ReceiveGrpc(int fd, msghdr* message, int flags);

}  // namespace pytriton::guard
