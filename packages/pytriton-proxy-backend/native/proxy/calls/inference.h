// Inference that a worker asks for: it becomes a request of ours in Triton, and the worker gets its responses.
#pragma once

#include <memory>
#include <string>

#include "../triton/triton_util.h"
#include "../wire/record.h"
#include "call.h"
#include "calls.h"
#include "failure.h"

namespace pytriton {

struct DeleteResponse {
  void operator()(TRITONSERVER_InferenceResponse* response) const {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceResponseDelete(response), "deleting a response");
  }
};
using Response = std::unique_ptr<TRITONSERVER_InferenceResponse, DeleteResponse>;

// Hands a request to Triton, or deletes it and returns the failure. Triton's threads hand responses, and the end of the
// request, to the `Caller` of the call. The error texts are those of Triton's Python backend, because models compare
// them.
Failure Infer(const CallContext& context, const CallRef& call, const CallBody& body, const std::string& name,
              const CallRecord& in);

// Reads a response of Triton as views of its memory.
Failure ReadResponse(TRITONSERVER_InferenceResponse* response, ResponseSource* source);

// Allocates memory for outputs until they are copied into the arena. It lives as long as the process, because responses
// may still come after their model is gone.
TRITONSERVER_ResponseAllocator* OutputAllocator();

}  // namespace pytriton
