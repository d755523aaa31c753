// The front end for gRPC, in `native/grpc`: what it uses of the guard.
#pragma once

#include "../in_force.h"

namespace pytriton::guard {

// Starts it, unless the settings or the server's options leave gRPC to Triton.
void StartFrontEnd(Guard& guard, int argc, char** argv);

// A copy of a listener that a forked child of the starter may hold, or that waits in a message which nobody reads, is to
// listen no longer than this server.
void EndListener(int fd);

}  // namespace pytriton::guard
