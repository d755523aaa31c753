// The threads in which tritonserver runs instances of models, so that a model is not deleted beside their last step.
//
// Bug: see WaitForInstanceThreads. A server crashed in 5 of 9 runs of 1,200 loads and unloads on a busy machine.
// Until: all versions up to 2.68 have the code; later ones were not read.
#pragma once

#include <pthread.h>
#include <sys/types.h>

namespace pytriton::guard {

// Remembers this thread as that of an instance.
void AddInstanceThread();

// Whether what `std::thread` is about to run in a new thread is Triton's deletion of a model.
bool DeletesModel(void* state);

// Waits until each thread of an instance was once asleep, or has ended; not for those that compute for seconds.
//
// Such a thread takes its instance out of a list while it works, and puts it back after it has told that it is done
// (TritonBackendThread::BackendThread in Triton's backend_model_instance.cc). A model that is deleted in between, right
// after its load or its last answer, is looked for in an empty list, which ends the server.
void WaitForInstanceThreads();

using CreateThreadFunction = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

// As pthread_create, which is `next`, called by `std::thread`: the deletion of a model waits as above.
int CreateThread(CreateThreadFunction next, pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                 void* argument);

// Whether an address lies in the library that has `std::thread`.
bool IsStandardLibrary(const void* address);

}  // namespace pytriton::guard
