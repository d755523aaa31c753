// Connections to Triton's own front end for gRPC: callers of a server that is being replaced are told to open another
// one.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

namespace pytriton::guard {

// Work like sendmsg and recvmsg, for any descriptor.
ssize_t SendGrpc(int fd, const msghdr* message, int flags);
ssize_t ReceiveGrpc(int fd, msghdr* message, int flags);

}  // namespace pytriton::guard
