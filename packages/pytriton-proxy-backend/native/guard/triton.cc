#include "triton.h"

#include <dlfcn.h>

namespace pytriton::guard {

namespace {

template <typename Function>
void Find(Function* function, const char* name) {
  *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

TritonFunctions g_triton{};

void FindTritonFunctions() {
  Find(&g_triton.make_error, "TRITONSERVER_ErrorNew");
  Find(&g_triton.byte_size, "TRITONSERVER_BufferAttributesByteSize");
  Find(&g_triton.cancel, "TRITONSERVER_InferenceRequestCancel");
  Find(&g_triton.delete_error, "TRITONSERVER_ErrorDelete");
  Find(&g_triton.error_code, "TRITONSERVER_ErrorCode");
  Find(&g_triton.error_text, "TRITONSERVER_ErrorMessage");
  Find(&g_triton.delete_response, "TRITONSERVER_InferenceResponseDelete");
  Find(&g_triton.response_error, "TRITONSERVER_InferenceResponseError");
  Find(&g_triton.properties, "TRITONSERVER_ServerModelTransactionProperties");
  Find(&g_triton.batch_properties, "TRITONSERVER_ServerModelBatchProperties");
  Find(&g_triton.output_count, "TRITONSERVER_InferenceResponseOutputCount");
  Find(&g_triton.output, "TRITONSERVER_InferenceResponseOutput");
  Find(&g_triton.to_json, "TRITONSERVER_MessageSerializeToJson");
  Find(&g_triton.delete_message, "TRITONSERVER_MessageDelete");
  Find(&g_triton.index, "TRITONSERVER_ServerModelIndex");
}

bool IsError(TRITONSERVER_Error* error) {
  if (error != nullptr) g_triton.delete_error(error);
  return error != nullptr;
}

void CancelRequest(TRITONSERVER_InferenceRequest* request) {
  if (g_triton.cancel != nullptr) IsError(g_triton.cancel(request));
}

}  // namespace pytriton::guard
