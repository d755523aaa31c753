// The front end for gRPC, in `native/grpc`: what it uses of the guard.
#pragma once

#include "../in_force.h"

namespace pytriton::guard {

// Starts it, unless the settings or the server's options leave gRPC to Triton.
void StartFrontEnd(Guard& guard, int argc, char** argv);

// Makes a listener stop listening when this server does, even if a forked child of the starter, or an unread message,
// still holds a copy of it.
void EndListener(int fd);

}  // namespace pytriton::guard
