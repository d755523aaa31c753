// Checks the inputs and outputs that a request names, before Triton or a front end allocates memory for them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../triton.h"

namespace pytriton::guard {

// Called before a request is made. Counts the request, or returns an error if the server is about to end.
TRITONSERVER_Error* CheckEnding();

// Called after this thread has made a request, which is null if that failed, and before it deletes one.
void OnRequestMade(const TRITONSERVER_InferenceRequest* request);
void OnRequestDeleted(const TRITONSERVER_InferenceRequest* request);

// Each of these returns an error for the caller of the request, or null if nothing is wrong.
TRITONSERVER_Error* CheckInput(const TRITONSERVER_InferenceRequest* request, const char* name, int data_type,
                               const int64_t* shape, uint64_t dims_count);
TRITONSERVER_Error* CheckInputData(const char* name, const void* base, size_t size);
TRITONSERVER_Error* CheckInputData(const char* name, const void* base, TRITONSERVER_BufferAttributes* attributes);
TRITONSERVER_Error* CheckTensorBytes(size_t size);
TRITONSERVER_Error* CheckRequestedOutput(const TRITONSERVER_InferenceRequest* request, const char* name);
TRITONSERVER_Error* CheckOutputBuffer(const void* buffer, uint64_t size);

// Returns the size of an element of a data type, which is never 0: a classification divides by it.
uint32_t ElementSize(int data_type, uint32_t size);

}  // namespace pytriton::guard
