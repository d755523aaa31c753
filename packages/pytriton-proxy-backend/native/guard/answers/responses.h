// Responses over HTTP as the front end writes them: how each request ends is counted, and its response set right.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include "../connections.h"
#include "../in_force.h"

namespace pytriton::guard {

// As writev, of any descriptor.
ssize_t WriteHttp(int fd, const iovec* parts, int count);

// A request of a connection is whole: its outcome is counted from here on.
void BeginOutcome(Guard* guard, Connection* connection);

// Counts what the caller of a connection gave up.
void CountLeft(const Connection& connection);

}  // namespace pytriton::guard
