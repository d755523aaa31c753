// A backend as those of GPUs are: its output is its input, in the memory of a device, each time of another one. It has
// done its work before it sends its response.
#include <dlfcn.h>

#include <atomic>
#include <string>
#include <vector>

#include "triton/triton_api.h"

#define RETURN_IF(call) \
  if (TRITONSERVER_Error* failed = (call); failed != nullptr) return failed

namespace {

using CopyAsync = int (*)(void* to, const void* from, size_t size, int kind, void* stream);
using Synchronize = int (*)(void* stream);

TRITONSERVER_Error* Wrong(const std::string& text) { return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, text.c_str()); }

TRITONSERVER_Error* Answer(TRITONBACKEND_Request* request, TRITONBACKEND_Response* response, int64_t wanted) {
  static const auto copy = reinterpret_cast<CopyAsync>(dlsym(RTLD_DEFAULT, "cudaMemcpyAsync"));
  static const auto wait = reinterpret_cast<Synchronize>(dlsym(RTLD_DEFAULT, "cudaStreamSynchronize"));
  if (copy == nullptr || wait == nullptr) return Wrong("this server has no CUDA runtime");
  TRITONBACKEND_Input* input = nullptr;
  TRITONSERVER_DataType dtype;
  const int64_t* dims = nullptr;
  uint32_t dims_count = 0, buffers = 0;
  uint64_t bytes = 0;
  const char* name = nullptr;
  RETURN_IF(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  RETURN_IF(TRITONBACKEND_InputProperties(input, &name, &dtype, &dims, &dims_count, &bytes, &buffers));
  TRITONBACKEND_Output* output = nullptr;
  void* buffer = nullptr;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_GPU;
  int64_t device = wanted;
  RETURN_IF(TRITONBACKEND_ResponseOutput(response, &output, "y", dtype, dims, dims_count));
  RETURN_IF(TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &device));
  if (memory != TRITONSERVER_MEMORY_GPU || device != wanted) {
    return Wrong("memory of GPU " + std::to_string(wanted) + " was wanted, the server gave memory of kind " +
                 std::to_string(memory) + " of device " + std::to_string(device));
  }
  uint64_t done = 0;
  for (uint32_t i = 0; i < buffers; ++i) {
    const void* data = nullptr;
    uint64_t size = 0;
    RETURN_IF(TRITONBACKEND_InputBuffer(input, i, &data, &size, &memory, &device));
    const int error = copy(static_cast<char*>(buffer) + done, data, size, 4, nullptr);
    if (error != 0) return Wrong("cudaMemcpyAsync failed with " + std::to_string(error));
    done += size;
  }
  return wait(nullptr) == 0 ? nullptr : Wrong("cudaStreamSynchronize failed");
}

}  // namespace

extern "C" __attribute__((visibility("default"))) TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request** requests, const uint32_t count) {
  static std::atomic<int64_t> executed{0};
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Response* response = nullptr;
    RETURN_IF(TRITONBACKEND_ResponseNew(&response, requests[i]));
    TRITONSERVER_Error* error = Answer(requests[i], response, executed++ % 2);
    RETURN_IF(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    if (error != nullptr) TRITONSERVER_ErrorDelete(error);
    RETURN_IF(TRITONBACKEND_RequestRelease(requests[i], TRITONSERVER_REQUEST_RELEASE_ALL));
  }
  return nullptr;
}
