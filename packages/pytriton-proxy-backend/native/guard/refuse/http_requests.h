// Scans each HTTP request before the server's parser sees it, and refuses it or lets it through.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <string>

#include "../connections.h"
#include "../in_force.h"

namespace pytriton::guard {

// Works like readv, for any descriptor.
ssize_t ReadHttp(int fd, const iovec* parts, int count);

// Returns a status line such as "400 Bad Request".
std::string StatusText(int status);

// Ends a connection whose head has not come in time.
void RefuseLateHead(Connection* connection, int fd);

// Uncounts the requests of a connection: the memory of those that are being read, and the bytes of those that wait for
// responses.
void ReleaseMemory(Guard* guard, Connection* connection);
void StopAwaiting(Guard* guard, Connection* connection);

}  // namespace pytriton::guard
