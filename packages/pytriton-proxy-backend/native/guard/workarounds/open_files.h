// Callers over HTTP who come while the process can open no more files.
//
// Bug: libevent 2.1.12 calls accept again at once, for ever, so that a processor is busy and the caller waits.
// Until: no version of tritonserver is known to do better.
#pragma once

#include <sys/socket.h>

namespace pytriton::guard {

// Keeps a spare descriptor for that case.
void KeepSpare();

// Turns away a caller for whom no descriptor is left; otherwise the caller would wait, and the server would call accept
// without a pause.
void TurnAway(int listener, sockaddr* address, socklen_t* length, int flags);

}  // namespace pytriton::guard
