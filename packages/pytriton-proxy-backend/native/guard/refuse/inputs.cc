#include "inputs.h"

#include <string>
#include <unordered_set>

#include "../../proxy/wire/shared_limits.h"
#include "../in_force.h"
#include "../protections.h"
#include "compressed.h"
#include "memory.h"
#include "refusals.h"
#include "shape_check.h"
#include "shared_mappings.h"

namespace pytriton::guard {
namespace {

// No process can address more memory than this.
constexpr uint64_t kMostMemory = 1ull << 47;

// The request that this thread is making, and the bytes of its inputs so far.
struct RequestInputs {
  void Begin(const TRITONSERVER_InferenceRequest* made) {
    request = made;
    bytes = counted = 0;
    outputs.clear();
  }

  const TRITONSERVER_InferenceRequest* request = nullptr;
  uint64_t bytes = 0;
  uint64_t counted = 0;  // of these, in the memory in flight
  std::unordered_set<std::string> outputs;  // those that are asked for
};
thread_local RequestInputs t_inputs;

// Returns what is wrong with one more input of a request, or an empty text.
std::string FindInputProblem(Guard* guard, const TRITONSERVER_InferenceRequest* request, const char* name, int data_type,
                             const int64_t* shape, uint64_t dims_count, int* code) {
  *code = kInvalidArgument;
  std::string error;
  uint64_t bytes = 0;
  if (!BytesOfShape(name, data_type, shape, dims_count, &bytes, &error)) return error;
  if (t_inputs.request != request) t_inputs.Begin(request);
  const auto what = [&] {
    return "input '" + NameText(name) + "' has the shape " + ShapeText(shape, dims_count) + ", with which the request's "
           "inputs have " + Bytes(t_inputs.bytes);
  };
  if (__builtin_add_overflow(t_inputs.bytes, bytes, &t_inputs.bytes)) t_inputs.bytes = UINT64_MAX;
  if (t_inputs.bytes > guard->limits.max_input_bytes) {
    return what() + ", more than " + Bytes(guard->limits.max_input_bytes) + ", the limit max_input_bytes of the guard";
  }
  if (t_inputs.bytes <= kSmall) return "";
  // The front end allocates the memory of a tensor in JSON before it checks that the elements are there. Tensors in
  // shared memory are no part of the request body. The guard cannot know which of the requests in flight this one is,
  // so it compares with the bytes of all of them.
  if (t_reads_http && guard->pipelined.load(std::memory_order_relaxed) == 0 && !guard->has_gpu &&
      !guard->has_shared_memory.load(std::memory_order_relaxed)) {
    const uint64_t sent = guard->awaiting.load(std::memory_order_relaxed) + DecompressedBytes();
    if (t_inputs.bytes / kBytesPerJsonByte > sent) return what() + ", and no request in flight has so many";
  }
  const uint64_t more = t_inputs.bytes - t_inputs.counted;
  if (!guard->inputs.TryReserve(more, guard->limits.max_in_flight_bytes)) {
    *code = kUnavailable;
    return what() + ", and with all requests in flight more than " + Bytes(guard->limits.max_in_flight_bytes) +
           ", the limit max_in_flight_bytes of the guard; try again later";
  }
  large_requests().Add(request, more);
  t_inputs.counted = t_inputs.bytes;
  return "";
}

}  // namespace

TRITONSERVER_Error* CheckEnding() {
  Guard* const guard = Active();
  if (guard == nullptr) return nullptr;
  guard->listeners.CountRequest();
  if (!guard->listeners.is_ending()) return nullptr;
  guard->listeners.EndRequest();
  return g_triton.make_error(kUnavailable, "The server is being stopped and takes no more requests.");
}

void OnRequestMade(const TRITONSERVER_InferenceRequest* request) {
  Guard* const guard = Active();
  if (guard != nullptr && request == nullptr) guard->listeners.EndRequest();
  t_inputs.Begin(request);
}

void OnRequestDeleted(const TRITONSERVER_InferenceRequest* request) {
  if (Guard* const guard = Active(); guard != nullptr) {
    Reach(Protection::kRequestEnds);
    guard->listeners.EndRequest();
    guard->inputs.Release(large_requests().Remove(request));
  }
  if (t_inputs.request == request) t_inputs.Begin(nullptr);
}

TRITONSERVER_Error* CheckInput(const TRITONSERVER_InferenceRequest* request, const char* name, int data_type,
                               const int64_t* shape, uint64_t dims_count) {
  Guard* const guard = Refusing();
  if (guard == nullptr) return nullptr;
  Reach(Protection::kShapes);
  int code = 0;
  const std::string problem = FindInputProblem(guard, request, name, data_type, shape, dims_count, &code);
  return problem.empty() ? nullptr : Error(code, problem);
}

// The sum of an offset and a size in shared memory may have overflowed before this call.
TRITONSERVER_Error* CheckInputData(const char* name, const void* base, size_t size) {
  if (Refusing() == nullptr) return nullptr;
  Reach(Protection::kInputData);
  if (size > kMostMemory) return Error(kInvalidArgument, "input '" + NameText(name) + "' is said to have " + Bytes(size));
  const std::string problem = CheckSharedMemory(base, size);
  return problem.empty() ? nullptr : Error(kInvalidArgument, "input '" + NameText(name) + "' " + problem);
}

TRITONSERVER_Error* CheckInputData(const char* name, const void* base, TRITONSERVER_BufferAttributes* attributes) {
  if (Refusing() == nullptr) return nullptr;
  Reach(Protection::kInputData);
  size_t size = 0;
  if (g_triton.byte_size == nullptr || g_triton.byte_size(attributes, &size) != nullptr) return nullptr;
  const std::string problem = CheckSharedMemory(base, size);
  return problem.empty() ? nullptr : Error(kInvalidArgument, "input '" + NameText(name) + "' " + problem);
}

TRITONSERVER_Error* CheckTensorBytes(size_t size) {
  if (Refusing() == nullptr || size <= kMostMemory) return nullptr;
  return Error(kInvalidArgument, "a tensor is said to have " + Bytes(size));
}

// A request may name each output only once, because the server leaks memory for each repetition.
TRITONSERVER_Error* CheckRequestedOutput(const TRITONSERVER_InferenceRequest* request, const char* name) {
  if (Refusing() == nullptr || name == nullptr) return nullptr;
  Reach(Protection::kRequestedOutputs);
  if (t_inputs.request != request) t_inputs.Begin(request);
  if (t_inputs.outputs.insert(name).second) return nullptr;
  return Error(kInvalidArgument, "output '" + NameText(name) + "' is asked for more than once");
}

TRITONSERVER_Error* CheckOutputBuffer(const void* buffer, uint64_t size) {
  if (Refusing() == nullptr) return nullptr;
  const std::string problem = CheckSharedMemory(buffer, size);
  return problem.empty() ? nullptr : Error(kInvalidArgument, "an output " + problem);
}

uint32_t ElementSize(int data_type, uint32_t size) {
  if (Refusing() == nullptr) return size;
  Reach(Protection::kClassification);
  return size == 0 && static_cast<uint32_t>(data_type) == kBytesType ? 1 : size;
}

}  // namespace pytriton::guard
