// Requests over HTTP as they arrive: each is scanned before the server's parser sees it, and refused or let through.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <string>

#include "../connections.h"
#include "../in_force.h"

namespace pytriton::guard {

// As readv, of any descriptor.
ssize_t ReadHttp(int fd, const iovec* parts, int count);

// "400 Bad Request" and the like.
std::string StatusText(int status);

// Ends a connection whose head has not come in time.
void RefuseLateHead(Connection* connection, int fd);

// Gives back what the requests of a connection were counted with: the memory of those that are being read, and the bytes of
// those that wait for their responses.
void ReleaseMemory(Guard* guard, Connection* connection);
void StopAwaiting(Guard* guard, Connection* connection);

}  // namespace pytriton::guard
