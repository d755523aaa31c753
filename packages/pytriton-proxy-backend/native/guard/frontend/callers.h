// Requests that this process hands to Triton, each with the caller whose leaving cancels it: see http_callers.h.
#pragma once

#include "../triton.h"

namespace pytriton::guard {

struct Guard;

// This thread is about to read or write a connection over HTTP: the request that it makes next is of that one.
void BeginHandling(Guard* guard, int fd);
// This thread is about to hand a request to Triton. Returns the connection over HTTP that it is of, or -1.
int BeginSubmission(TRITONSERVER_InferenceRequest* request);
// Triton has the request, or refused it.
void EndSubmission(TRITONSERVER_InferenceRequest* request, int connection, bool is_submitted);
// A request is about to be deleted.
void OnCallerRequestDeleted(const TRITONSERVER_InferenceRequest* request);

}  // namespace pytriton::guard
