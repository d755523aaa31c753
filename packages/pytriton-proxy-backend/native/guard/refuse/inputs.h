// The inputs and outputs that a request names, before Triton or a front end takes memory for them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../triton.h"

namespace pytriton::guard {

// Before a request is made: counts it, or returns an error where the server is to end.
TRITONSERVER_Error* CheckEnding();

// This thread has made a request, or null where it could not, or has deleted one.
void OnRequestMade(const TRITONSERVER_InferenceRequest* request);
void OnRequestDeleted(const TRITONSERVER_InferenceRequest* request);

// Each returns an error where something is wrong, which is for the caller of the request; else null.
TRITONSERVER_Error* CheckInput(const TRITONSERVER_InferenceRequest* request, const char* name, int data_type,
                               const int64_t* shape, uint64_t dims_count);
TRITONSERVER_Error* CheckInputData(const char* name, const void* base, size_t size);
TRITONSERVER_Error* CheckInputData(const char* name, const void* base, TRITONSERVER_BufferAttributes* attributes);
TRITONSERVER_Error* CheckTensorBytes(size_t size);
TRITONSERVER_Error* CheckRequestedOutput(const TRITONSERVER_InferenceRequest* request, const char* name);
TRITONSERVER_Error* CheckOutputBuffer(const void* buffer, uint64_t size);

// The size of an element of a data type, for a classification that divides by it: never 0.
uint32_t ElementSize(int data_type, uint32_t size);

}  // namespace pytriton::guard
