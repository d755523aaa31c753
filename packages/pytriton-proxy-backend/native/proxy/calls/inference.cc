#include "inference.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "../batch/parameters.h"
#include "caller.h"

namespace pytriton {

namespace {

double AsDouble(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TRITONSERVER_Error* AllocateOutput(
    TRITONSERVER_ResponseAllocator*, const char* name, size_t size, TRITONSERVER_MemoryType, int64_t, void*,
    void** buffer, void** buffer_userp, TRITONSERVER_MemoryType* memory, int64_t* device) {
  *memory = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  *buffer = nullptr;
  *buffer_userp = nullptr;
  if (size == 0 || posix_memalign(buffer, kAlignment, size) == 0) return nullptr;
  return MakeError(
      TRITONSERVER_ERROR_UNAVAILABLE,
      "no memory for output '" + std::string(name) + "' of " + std::to_string(size) + " bytes");
}

TRITONSERVER_Error* FreeOutput(
    TRITONSERVER_ResponseAllocator*, void* buffer, void*, size_t, TRITONSERVER_MemoryType, int64_t) {
  free(buffer);
  return nullptr;
}

void RequestReleased(TRITONSERVER_InferenceRequest* request, const uint32_t, void* userp) {
  const std::unique_ptr<CallRef> ref(static_cast<CallRef*>(userp));
  Guarded("the end of a call", [&] {
    (*ref)->SetRequest(nullptr);
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceRequestDelete(request), "deleting a request");
    (*ref)->caller->Released(*ref);
  });
}

void ResponseComplete(TRITONSERVER_InferenceResponse* response, const uint32_t flags, void* userp) {
  auto* ref = static_cast<CallRef*>(userp);
  const bool final = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  Response owned(response);
  Guarded("the response of a call", [&] { (*ref)->caller->Respond(*ref, std::move(owned), final); });
  if (final) delete ref;
}

Failure AddParameters(const CallRecord& in, TRITONSERVER_InferenceRequest* request) {
  for (const auto& parameter : in.Parameters()) {
    switch (parameter.type) {
      case TRITONSERVER_PARAMETER_STRING:
        PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetStringParameter(request, parameter.key, parameter.text));
        break;
      case TRITONSERVER_PARAMETER_INT:
        PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetIntParameter(
            request, parameter.key, static_cast<int64_t>(parameter.value)));
        break;
      case TRITONSERVER_PARAMETER_BOOL:
        PYTRITON_FAIL_IF(
            TRITONSERVER_InferenceRequestSetBoolParameter(request, parameter.key, parameter.value != 0));
        break;
      default:
        PYTRITON_FAIL_IF(
            TRITONSERVER_InferenceRequestSetDoubleParameter(request, parameter.key, AsDouble(parameter.value)));
    }
  }
  return {};
}

Failure AddInputs(Call* call, const CallRecord& in, TRITONSERVER_InferenceRequest* request) {
  for (const auto& tensor : in.tensors()) {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestAddInput(
        request, tensor.name, static_cast<TRITONSERVER_DataType>(tensor.dtype), tensor.dims, tensor.dims_count));
    const void* data = tensor.payload;
    if (tensor.dtype == TRITONSERVER_TYPE_BYTES) {
      // The called model trusts the lengths in them, and the worker could still change its own memory, so they are
      // copied.
      const std::string& copy =
          call->strings.emplace_back(reinterpret_cast<const char*>(tensor.payload), tensor.payload_length);
      data = copy.data();
      std::string error;
      if (!FitsShape(tensor.dtype, tensor.dims, tensor.dims_count, reinterpret_cast<const uint8_t*>(copy.data()),
                     copy.size(), &error)) {
        return {TRITONSERVER_ERROR_INVALID_ARG, std::string("input '") + tensor.name + "' is " + error};
      }
    }
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestAppendInputData(
        request, tensor.name, data, tensor.payload_length, TRITONSERVER_MEMORY_CPU, 0));
  }
  return {};
}

Failure FillRequest(Call* call, const CallRecord& in, TRITONSERVER_InferenceRequest* request) {
  const RequestEntry& entry = in.entry();
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetId(request, in.id()));
  if (*in.correlation_string() != 0) {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetCorrelationIdString(request, in.correlation_string()));
  } else {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetCorrelationId(request, entry.correlation_id));
  }
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetFlags(request, entry.flags));
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(request, entry.timeout_us));
  if (entry.priority != 0) PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetPriorityUInt64(request, entry.priority));
  Failure failure = AddParameters(in, request);
  if (!failure) failure = AddInputs(call, in, request);
  if (failure) return failure;
  for (const char* output : in.Outputs()) {
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestAddRequestedOutput(request, output));
  }
  return {};
}

// Returns null if the request for which the call is made is not traced, or is already answered.
TRITONSERVER_InferenceTrace* SpawnTrace(const CallContext& context, const CallBody& body) {
  TRITONSERVER_InferenceTrace* child = nullptr;
  if (body.parent_batch == 0 || TRITONSERVER_InferenceTraceSpawnChildTrace == nullptr) return child;
  context.use_request(body.parent_batch, body.parent_request, [&child](TRITONBACKEND_Request* parent) {
    TRITONSERVER_InferenceTrace* trace = nullptr;
    if (!TakeMessage(TRITONBACKEND_RequestTrace(parent, &trace)).empty() || trace == nullptr) return;
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceTraceSpawnChildTrace(trace, &child), "the trace of a call");
  });
  return child;
}

// Checks that a model can be called; the error is what the callable reads.
Failure CheckModel(const CallContext& context, const Call& call, const std::string& name, int64_t version) {
  bool is_ready = false;
  PYTRITON_FAIL_IF(TRITONSERVER_ServerModelIsReady(context.server, name.c_str(), version, &is_ready));
  if (!is_ready) {
    return {TRITONSERVER_ERROR_INTERNAL,
            "Failed for execute the inference request. Model '" + name + "' is not ready."};
  }
  uint32_t properties = 0;
  PYTRITON_FAIL_IF(TRITONSERVER_ServerModelTransactionProperties(
      context.server, name.c_str(), version, &properties, nullptr));
  if (!call.stream && (properties & TRITONSERVER_TXN_DECOUPLED) != 0) {
    return {TRITONSERVER_ERROR_INTERNAL,
            "Model " + name +
                " is using the decoupled. The current BLS request call doesn't support models using the decoupled "
                "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
                "decoupled models.'"};
  }
  return {};
}

// Fills a request and hands it to Triton. If this fails, the caller of this function still owns the request.
Failure SendRequest(const CallContext& context, const CallRef& call, const CallBody& body, const CallRecord& in,
                    TRITONSERVER_InferenceRequest* request, CallRef* released, CallRef* completed) {
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetReleaseCallback(request, RequestReleased, released));
  Failure failure = FillRequest(call.get(), in, request);
  if (failure) return failure;
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestSetResponseCallback(
      request, context.allocator, nullptr, ResponseComplete, completed));
  // Triton may answer, release and delete the request before the call below returns. Only if the call fails is the
  // request still here.
  call->SetRequest(request);
  TRITONSERVER_InferenceTrace* trace = SpawnTrace(context, body);
  failure = Take(TRITONSERVER_ServerInferAsync(context.server, request, trace));
  if (!failure) return failure;
  // The trace is not deleted here. If Triton found the request wrong, the trace is still ours; if it refused the
  // request later, for instance because of a full queue, it has deleted the trace already. We cannot tell which, and
  // not deleting it costs only memory.
  call->SetRequest(nullptr);
  return failure;
}

Failure Submit(const CallContext& context, const CallRef& call, const CallBody& body, const std::string& name,
               const CallRecord& in) {
  Failure failure = CheckModel(context, *call, name, body.subject);
  if (failure) return failure;
  TRITONSERVER_InferenceRequest* request = nullptr;
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceRequestNew(&request, context.server, name.c_str(), body.subject));
  auto released = std::make_unique<CallRef>(call);
  auto completed = std::make_unique<CallRef>(call);
  failure = SendRequest(context, call, body, in, request, released.get(), completed.get());
  if (failure) {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_InferenceRequestDelete(request), "deleting a request");
  } else {
    released.release();
    completed.release();
  }
  return failure;
}

Failure ReadParameters(TRITONSERVER_InferenceResponse* response, ResponseSource* source) {
  uint32_t count = 0;
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceResponseParameterCount(response, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char* key = nullptr;
    TRITONSERVER_ParameterType type;
    const void* value = nullptr;
    PYTRITON_FAIL_IF(TRITONSERVER_InferenceResponseParameter(response, i, &key, &type, &value));
    if (!AddParameter(key, type, value, source)) {
      return {TRITONSERVER_ERROR_INTERNAL, std::string("Unsupported parameter type for parameter '") + key + "'."};
    }
  }
  return {};
}

Failure ReadOutput(TRITONSERVER_InferenceResponse* response, uint32_t i, ResponseSource* source) {
  const char* name = nullptr;
  TRITONSERVER_DataType dtype;
  const int64_t* dims = nullptr;
  uint64_t dims_count = 0;
  const void* base = nullptr;
  size_t size = 0;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  void* userp = nullptr;
  PYTRITON_FAIL_IF(TRITONSERVER_InferenceResponseOutput(
      response, i, &name, &dtype, &dims, &dims_count, &base, &size, &memory, &device, &userp));
  std::string error;
  if (!FitsShape(static_cast<uint32_t>(dtype), dims, dims_count, static_cast<const uint8_t*>(base), size, &error)) {
    return {TRITONSERVER_ERROR_INTERNAL, std::string("output '") + name + "' of the response is " + error};
  }
  TensorSource tensor{};
  tensor.name = name;
  tensor.dtype = static_cast<uint32_t>(dtype);
  tensor.first_dim = static_cast<uint32_t>(source->dims.size());
  tensor.dims_count = static_cast<uint32_t>(dims_count);
  tensor.first_piece = static_cast<uint32_t>(source->pieces.size());
  tensor.piece_count = 1;
  tensor.length = size;
  source->dims.insert(source->dims.end(), dims, dims + dims_count);
  source->pieces.push_back({base, size});
  source->tensors.push_back(tensor);
  return {};
}

}  // namespace

Failure Infer(const CallContext& context, const CallRef& call, const CallBody& body, const std::string& name,
              const CallRecord& in) {
  const Failure failure = Submit(context, call, body, name, in);
  if (!failure) return failure;
  return {TRITONSERVER_ERROR_INTERNAL, "Model " + name + " - Error when running inference: " + failure.text};
}

Failure ReadResponse(TRITONSERVER_InferenceResponse* response, ResponseSource* source) {
  Failure failure = ReadParameters(response, source);
  uint32_t count = 0;
  if (!failure) failure = Take(TRITONSERVER_InferenceResponseOutputCount(response, &count));
  for (uint32_t i = 0; i < count && !failure; ++i) failure = ReadOutput(response, i, source);
  return failure;
}

TRITONSERVER_ResponseAllocator* OutputAllocator() {
  static TRITONSERVER_ResponseAllocator* const allocator = [] {
    TRITONSERVER_ResponseAllocator* made = nullptr;
    PYTRITON_LOG_IF_ERROR(
        TRITONSERVER_ResponseAllocatorNew(&made, AllocateOutput, FreeOutput, nullptr), "response allocator");
    return made;
  }();
  return allocator;
}

}  // namespace pytriton
