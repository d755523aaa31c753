// The threads in which tritonserver runs instances of models, so that a model is not deleted during their last step.
//
// Bug: see WaitForInstanceThreads. A server crashed in 5 of 9 runs of 1,200 loads and unloads on a busy machine.
// Until: all versions up to 2.68 have the code; later ones were not read.
#pragma once

#include <pthread.h>
#include <sys/types.h>

namespace pytriton::guard {

// Remembers that this thread runs an instance.
void AddInstanceThread();

// Whether `std::thread` is about to run Triton's deletion of a model in a new thread.
bool DeletesModel(void* state);

// Waits until each thread of an instance was asleep once, or has ended, but not for threads that compute for seconds.
//
// Such a thread takes its instance out of a list while it works, and puts it back after it has reported that it is done
// (TritonBackendThread::BackendThread in Triton's backend_model_instance.cc). If a model is deleted in between, right
// after its load or its last answer, Triton searches it in an empty list and crashes.
void WaitForInstanceThreads();

using CreateThreadFunction = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

// Works like pthread_create, which is `next`, for `std::thread`: the deletion of a model waits as above.
int CreateThread(CreateThreadFunction next, pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                 void* argument);

// Whether an address lies in the library that has `std::thread`.
bool IsStandardLibrary(const void* address);

}  // namespace pytriton::guard
