// What happens when the server crashes: it says so and is dead at once.
//
// Bug: Triton's own handler makes a stack trace with functions that allocate. Where the crash came while the heap's lock was held,
// or the heap is broken, it waits for that lock for ever: a process that neither serves nor ends.
// Until: no version of tritonserver is known to do better.
#pragma once

namespace pytriton::guard {

// Handles the signals of a crash from now on.
void HandleCrashes();

// Remembers where the libraries that are loaded by now lie, to name them in a crash.
void RememberModules();

// Whether a signal is one of a crash, which no other handler may take over.
bool IsCrash(int signal);

}  // namespace pytriton::guard
