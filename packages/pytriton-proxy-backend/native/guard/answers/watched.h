// How Triton says that a request ends: to the callback of a front end, in front of which the guard stands.
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

// This thread gives one more input to a request, which has passed all checks.
void NoteSamples(const TRITONSERVER_InferenceRequest* request, const int64_t* shape, uint64_t dims_count);

// As TRITONSERVER_InferenceRequestSetResponseCallback, which is `next`, called by a front end.
TRITONSERVER_Error* WatchResponses(SetCallbackFunction next, TRITONSERVER_InferenceRequest* request,
                                   TRITONSERVER_ResponseAllocator* allocator, void* allocator_user,
                                   OnResponseFunction on_response, void* user);

// As TRITONSERVER_ServerInferAsync, which is `next`. What watches the responses may be gone when that returns.
TRITONSERVER_Error* SubmitWatched(SubmitFunction next, TRITONSERVER_Server* server, TRITONSERVER_InferenceRequest* request,
                                  void* trace);

// Returns an error where a name of a request to `generate` is no input of its model; else null.
TRITONSERVER_Error* CheckName(const TRITONSERVER_InferenceRequest* request, const char* name);

}  // namespace pytriton::guard
