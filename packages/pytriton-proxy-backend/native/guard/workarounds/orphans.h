// Ends a server whose starter is gone.
//
// Bug: such a server gets SIGTERM from the kernel, but one that hangs, in a model or in its own shutdown, reacts only
// to SIGKILL.
// Until: no version of tritonserver is known to do better.
#pragma once

namespace pytriton::guard {

// Ends the server some time after its starter has ended.
void EndWithStarter();

}  // namespace pytriton::guard
