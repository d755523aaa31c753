// Learns how Triton ends a request, by replacing the callback of a front end.
#pragma once

#include <cstdint>

#include "../triton.h"

namespace pytriton::guard {

using OnResponseFunction = void (*)(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* user);
using SetCallbackFunction = TRITONSERVER_Error* (*)(TRITONSERVER_InferenceRequest* request,
                                                    TRITONSERVER_ResponseAllocator* allocator, void* allocator_user,
                                                    OnResponseFunction on_response, void* user);
using SubmitFunction = TRITONSERVER_Error* (*)(TRITONSERVER_Server* server, TRITONSERVER_InferenceRequest* request,
                                               void* trace);

// This thread adds another input to a request, which has passed all checks.
void NoteSamples(const TRITONSERVER_InferenceRequest* request, const int64_t* shape, uint64_t dims_count);

// Works like TRITONSERVER_InferenceRequestSetResponseCallback, which is `next` and is called by a front end.
TRITONSERVER_Error* WatchResponses(SetCallbackFunction next, TRITONSERVER_InferenceRequest* request,
                                   TRITONSERVER_ResponseAllocator* allocator, void* allocator_user,
                                   OnResponseFunction on_response, void* user);

// Works like TRITONSERVER_ServerInferAsync, which is `next`. The object that watches the responses may be gone when
// this returns.
TRITONSERVER_Error* SubmitWatched(SubmitFunction next, TRITONSERVER_Server* server, TRITONSERVER_InferenceRequest* request,
                                  void* trace);

// Returns an error if a name in a request to `generate` is no input of its model; otherwise null.
TRITONSERVER_Error* CheckName(const TRITONSERVER_InferenceRequest* request, const char* name);

}  // namespace pytriton::guard
