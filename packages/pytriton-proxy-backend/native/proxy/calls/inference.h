// Inference that a worker asks for: a request of its own in Triton, whose responses the worker gets.
#pragma once

#include <memory>
#include <string>

#include "../calls.h"
#include "../record.h"
#include "../triton_util.h"
#include "call.h"
#include "failure.h"

namespace pytriton {

struct DeleteResponse {
  void operator()(TRITONSERVER_InferenceResponse* response) const {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceResponseDelete(response), "deleting a response");
  }
};
using Response = std::unique_ptr<TRITONSERVER_InferenceResponse, DeleteResponse>;

// Hands a request to Triton; where that fails, nothing is left of it. The caller of the call gets the responses, and the
// end of the request, in threads of Triton's. The texts are those of Triton's Python backend, whose models look for them.
Failure Infer(const CallContext& context, const CallRef& call, const CallBody& body, const std::string& name,
              const CallRecord& in);

// Reads a response of Triton's: views on it.
Failure ReadResponse(TRITONSERVER_InferenceResponse* response, ResponseSource* source);

// Memory for outputs, until they are copied into the arena. One for the life of the process: responses that are on their way
// when a model goes still need it.
TRITONSERVER_ResponseAllocator* OutputAllocator();

}  // namespace pytriton
