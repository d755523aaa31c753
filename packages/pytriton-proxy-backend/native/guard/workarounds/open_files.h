// Callers over HTTP who come while the process may open no more files.
//
// Bug: libevent 2.1.12 calls accept again at once, for ever, so that a processor is lost and the caller waits.
// Until: no version of tritonserver is known to do better.
#pragma once

#include <sys/socket.h>

namespace pytriton::guard {

// Keeps a descriptor for that time.
void KeepSpare();

// Turns a caller away for whom no descriptor is left: he would wait, and the server would ask for him without a pause.
void TurnAway(int listener, sockaddr* address, socklen_t* length, int flags);

}  // namespace pytriton::guard
