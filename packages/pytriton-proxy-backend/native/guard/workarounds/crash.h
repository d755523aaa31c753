// Reports a crash of the server, and ends the process at once.
//
// Bug: Triton's own handler makes a stack trace with functions that allocate. If the crash came while the heap's lock
// was held, or if the heap is broken, it waits for that lock for ever: the process neither serves nor ends.
// Until: no version of tritonserver is known to do better.
#pragma once

namespace pytriton::guard {

// Handles the signals of crashes from now on.
void HandleCrashes();

// Remembers where the libraries lie that are loaded by now, to name them in a crash report.
void RememberModules();

// Whether a signal means a crash; no other handler may take it over.
bool IsCrash(int signal);

}  // namespace pytriton::guard
