// A server whose starter is gone.
//
// Bug: such a server gets SIGTERM from the kernel, and one that hangs, in a model or in its own shutdown, acts on no signal
// but SIGKILL.
// Until: no version of tritonserver is known to do better.
#pragma once

namespace pytriton::guard {

// Has the server end some time after its starter has.
void EndWithStarter();

}  // namespace pytriton::guard
