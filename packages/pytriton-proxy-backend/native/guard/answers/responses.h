// Responses over HTTP while the front end writes them: counts how each request ends, and corrects its response.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include "../connections.h"
#include "../in_force.h"

namespace pytriton::guard {

// Works like writev, for any descriptor.
ssize_t WriteHttp(int fd, const iovec* parts, int count);

// A request of a connection is complete; its outcome is counted from now on.
void BeginOutcome(Guard* guard, Connection* connection);

// Counts the requests of a connection whose caller has left.
void CountLeft(const Connection& connection);

}  // namespace pytriton::guard
