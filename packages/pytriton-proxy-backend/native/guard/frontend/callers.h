// Requests that this process hands to Triton, with the callers for whom they are cancelled: see http_callers.h.
#pragma once

#include "../triton.h"

namespace pytriton::guard {

struct Guard;

// This thread is about to read or write an HTTP connection; the next request that it makes belongs to that connection.
void BeginHandling(Guard* guard, int fd);
// This thread is about to hand a request to Triton. Returns its HTTP connection, or -1.
int BeginSubmission(TRITONSERVER_InferenceRequest* request);
// Triton has the request, or refused it.
void EndSubmission(TRITONSERVER_InferenceRequest* request, int connection, bool is_submitted);
// A request is about to be deleted.
void OnCallerRequestDeleted(const TRITONSERVER_InferenceRequest* request);

}  // namespace pytriton::guard
