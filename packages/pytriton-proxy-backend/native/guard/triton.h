// The part of Triton's C API that the guard uses; the ABI only grows.
#pragma once

#include <cstddef>
#include <cstdint>

struct TRITONBACKEND_Output;
struct TRITONSERVER_BufferAttributes;
struct TRITONSERVER_Error;
struct TRITONSERVER_InferenceRequest;
struct TRITONSERVER_InferenceResponse;
struct TRITONSERVER_Message;
struct TRITONSERVER_ResponseAllocator;
struct TRITONSERVER_Server;

namespace pytriton::guard {

constexpr int kInvalidArgument = 3;  // TRITONSERVER_ERROR_INVALID_ARG
constexpr int kUnavailable = 4;      // TRITONSERVER_ERROR_UNAVAILABLE
constexpr uint32_t kFinal = 1;       // TRITONSERVER_RESPONSE_COMPLETE_FINAL

// The functions of Triton that the guard calls, found by name; null if the server lacks one.
struct TritonFunctions {
  TRITONSERVER_Error* (*make_error)(int code, const char* text);
  TRITONSERVER_Error* (*byte_size)(TRITONSERVER_BufferAttributes* attributes, size_t* size);
  TRITONSERVER_Error* (*cancel)(TRITONSERVER_InferenceRequest* request);
  void (*delete_error)(TRITONSERVER_Error* error);
  int (*error_code)(TRITONSERVER_Error* error);
  const char* (*error_text)(TRITONSERVER_Error* error);
  TRITONSERVER_Error* (*delete_response)(TRITONSERVER_InferenceResponse* response);
  TRITONSERVER_Error* (*response_error)(TRITONSERVER_InferenceResponse* response);
  TRITONSERVER_Error* (*to_json)(TRITONSERVER_Message* message, const char** text, size_t* size);
  TRITONSERVER_Error* (*delete_message)(TRITONSERVER_Message* message);
  TRITONSERVER_Error* (*index)(TRITONSERVER_Server* server, uint32_t flags, TRITONSERVER_Message** message);
  TRITONSERVER_Error* (*properties)(TRITONSERVER_Server* server, const char* model, int64_t version, uint32_t* flags,
                                    void* none);
  TRITONSERVER_Error* (*batch_properties)(TRITONSERVER_Server* server, const char* model, int64_t version,
                                          uint32_t* flags, void* none);
  TRITONSERVER_Error* (*output_count)(TRITONSERVER_InferenceResponse* response, uint32_t* count);
  TRITONSERVER_Error* (*output)(TRITONSERVER_InferenceResponse* response, uint32_t index, const char** name, int* type,
                                const int64_t** shape, uint64_t* dims_count, const void** base, size_t* size,
                                int* memory_type, int64_t* memory_type_id, void** user);
};
extern TritonFunctions g_triton;

void FindTritonFunctions();

// Whether a call failed. Deletes the error.
bool IsError(TRITONSERVER_Error* error);

// Asks Triton to cancel a request, which servers can from 2.39 on.
void CancelRequest(TRITONSERVER_InferenceRequest* request);

}  // namespace pytriton::guard
