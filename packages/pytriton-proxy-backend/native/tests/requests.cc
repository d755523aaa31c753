// Requests of the process against a double of Triton that counts what it gives away, and fails wherever Triton may: each of
// its functions in turn. Nothing may be left, and each request ends.
#include <cstring>
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../inprocess/requests.h"
#include "check.h"
#include "triton_failures.h"

// ---- Triton ----------------------------------------------------------------------------------------------------------

struct TRITONSERVER_ResponseAllocator {
  TRITONSERVER_ResponseAllocatorAllocFn_t make;
  TRITONSERVER_ResponseAllocatorReleaseFn_t free;
};

struct Output {
  std::string name;
  TRITONSERVER_DataType dtype;
  std::vector<int64_t> dims;
  size_t size;
  void* data = nullptr;
  void* userp = nullptr;
};

struct TRITONSERVER_InferenceResponse {
  TRITONSERVER_ResponseAllocator* allocator;
  std::vector<Output> outputs;
  bool failed;
};

struct TRITONSERVER_InferenceRequest {
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  TRITONSERVER_InferenceRequestReleaseFn_t released = nullptr;
  void* released_userp = nullptr;
  TRITONSERVER_InferenceResponseCompleteFn_t completed = nullptr;
  void* completed_userp = nullptr;
};

namespace {

int64_t requests = 0, responses = 0;
// What a request is answered with.
struct Answer {
  std::vector<Output> outputs;
  bool failed = false;
  int count = 1;
  bool released_first = false;
} answer;

}  // namespace

extern "C" {

bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel) { return false; }
TRITONSERVER_Error* TRITONSERVER_LogMessage(TRITONSERVER_LogLevel, const char*, int, const char*) { return nullptr; }

TRITONSERVER_Error* TRITONSERVER_ResponseAllocatorNew(
    TRITONSERVER_ResponseAllocator** allocator, TRITONSERVER_ResponseAllocatorAllocFn_t make,
    TRITONSERVER_ResponseAllocatorReleaseFn_t free, TRITONSERVER_ResponseAllocatorStartFn_t) {
  static TRITONSERVER_ResponseAllocator made;
  made = {make, free};
  *allocator = &made;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestNew(
    TRITONSERVER_InferenceRequest** request, TRITONSERVER_Server*, const char*, int64_t) {
  MAY_FAIL;
  ++requests;
  *request = new TRITONSERVER_InferenceRequest;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  --requests;
  delete request;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest*) { return nullptr; }
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAddInput(
    TRITONSERVER_InferenceRequest*, const char*, TRITONSERVER_DataType, const int64_t*, uint64_t) {
  MAY_FAIL;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestAppendInputData(
    TRITONSERVER_InferenceRequest*, const char*, const void*, size_t, TRITONSERVER_MemoryType, int64_t) {
  MAY_FAIL;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetReleaseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceRequestReleaseFn_t released, void* userp) {
  MAY_FAIL;
  request->released = released;
  request->released_userp = userp;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceRequestSetResponseCallback(
    TRITONSERVER_InferenceRequest* request, TRITONSERVER_ResponseAllocator* allocator, void*,
    TRITONSERVER_InferenceResponseCompleteFn_t completed, void* userp) {
  MAY_FAIL;
  request->allocator = allocator;
  request->completed = completed;
  request->completed_userp = userp;
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_ServerInferAsync(
    TRITONSERVER_Server*, TRITONSERVER_InferenceRequest* request, TRITONSERVER_InferenceTrace*) {
  MAY_FAIL;
  const auto released = request->released;
  void* released_userp = request->released_userp;
  const auto completed = request->completed;
  void* completed_userp = request->completed_userp;
  auto* allocator = request->allocator;
  if (answer.released_first) released(request, 1, released_userp);
  for (int i = 0; i < answer.count; ++i) {
    auto* response = new TRITONSERVER_InferenceResponse{allocator, answer.outputs, answer.failed};
    ++responses;
    for (Output& output : response->outputs) {
      TRITONSERVER_MemoryType memory;
      int64_t device;
      CHECK(allocator->make(
                allocator, output.name.c_str(), output.size, TRITONSERVER_MEMORY_CPU, 0, nullptr, &output.data, &output.userp,
                &memory, &device) == nullptr);
      if (output.size != 0) std::memset(output.data, 1, output.size);
    }
    completed(response, i + 1 == answer.count ? 1u : 0u, completed_userp);
  }
  if (answer.count == 0) completed(nullptr, TRITONSERVER_RESPONSE_COMPLETE_FINAL, completed_userp);
  if (!answer.released_first) released(request, 1, released_userp);
  return nullptr;
}

TRITONSERVER_Error* TRITONSERVER_InferenceResponseError(TRITONSERVER_InferenceResponse* response) {
  // A new one each time, which belongs to whoever asks.
  return response->failed ? TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "") : nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse* response) {
  --responses;
  for (const Output& output : response->outputs) {
    response->allocator->free(response->allocator, output.data, output.userp, output.size, TRITONSERVER_MEMORY_CPU, 0);
  }
  delete response;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseModel(
    TRITONSERVER_InferenceResponse*, const char** name, int64_t* version) {
  MAY_FAIL;
  *name = "model";
  *version = 1;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameterCount(TRITONSERVER_InferenceResponse*, uint32_t* count) {
  MAY_FAIL;
  *count = 1;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseParameter(
    TRITONSERVER_InferenceResponse*, uint32_t, const char** key, TRITONSERVER_ParameterType* type, const void** value) {
  MAY_FAIL;
  *key = "key";
  *type = TRITONSERVER_PARAMETER_STRING;
  *value = "text";
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutputCount(
    TRITONSERVER_InferenceResponse* response, uint32_t* count) {
  MAY_FAIL;
  *count = static_cast<uint32_t>(response->outputs.size());
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutput(
    TRITONSERVER_InferenceResponse* response, uint32_t index, const char** name, TRITONSERVER_DataType* dtype,
    const int64_t** shape, uint64_t* dims, const void** base, size_t* size, TRITONSERVER_MemoryType* memory,
    int64_t* device, void** userp) {
  MAY_FAIL;
  const Output& output = response->outputs[index];
  *name = output.name.c_str();
  *dtype = output.dtype;
  *shape = output.dims.data();
  *dims = output.dims.size();
  *base = output.data;
  *size = output.size;
  *memory = TRITONSERVER_MEMORY_CPU;
  *device = 0;
  *userp = output.userp;
  return nullptr;
}
TRITONSERVER_Error* TRITONSERVER_InferenceResponseOutputClassificationLabel(
    TRITONSERVER_InferenceResponse*, uint32_t, size_t, const char** label) {
  MAY_FAIL;
  *label = "label";
  return nullptr;
}

}  // extern "C"

using namespace pytriton;

namespace {

constexpr auto kUint8 = static_cast<TRITONSERVER_DataType>(2);
constexpr auto kFp32 = static_cast<TRITONSERVER_DataType>(11);

// One request from its beginning to its end; gives its error, "none" where there is none.
std::string Infer() {
  const int64_t dims[] = {3};
  const float values[] = {1, 2, 3};
  const InputTensor input{"x", kFp32, dims, 1, values, sizeof(values), TRITONSERVER_MEMORY_CPU, 0};
  auto* request = new PendingRequest(1);
  TRITONSERVER_Error* error = request->Create(nullptr, "model", -1, {input, input});
  if (error == nullptr) error = request->Submit(nullptr, nullptr, nullptr, 0);
  std::string told = "none";
  if (error != nullptr) {
    told = "refused";
    TRITONSERVER_ErrorDelete(error);
  } else {
    std::unique_ptr<ReceivedResponse> response;
    int taken = 0;
    while (request->Take(0, &response) == PendingRequest::Taken::kResponse) {
      ++taken;
      if (response->failed) {
        told = "error " + std::to_string(response->error_code) + ": " + response->error;
        CHECK(response->outputs.empty());
      }
      for (const OutputTensor& output : response->outputs) {
        for (size_t i = 0; i < output.size; ++i) CHECK(static_cast<const uint8_t*>(output.data)[i] == 1);
      }
      CHECK(response->final == (taken == std::max(answer.count, 1)));
    }
    CHECK(taken == std::max(answer.count, 1));
    CHECK(request->Take(0, &response) == PendingRequest::Taken::kNothingMore);
  }
  request->Unref();
  CHECK(errors == 0 && requests == 0 && responses == 0);
  return told;
}

}  // namespace

int main() {
  CHECK(MakeHostAllocator() == nullptr);
  std::map<std::string, int> failures;
  for (const bool released_first : {false, true}) {
    for (const int count : {0, 1, 3}) {
      for (const bool failed : {false, true}) {
        // What fits, in all forms.
        answer = {{{"y", kFp32, {1, 3}, 12}, {"empty", kFp32, {0, 3}, 0}, {"s", TRITONSERVER_TYPE_BYTES, {1}, 5},
                   {"large", kUint8, {100, 1000}, 100000}},
                  failed, count, released_first};
        failing_call = -1;
        CHECK(Infer() == (failed && count != 0 ? "error 1: " : "none"));
        // Each call in turn, until all of them are made.
        for (failing_call = 0;; ++failing_call) {
          calls = 0;
          failed_function.clear();
          const std::string told = Infer();
          if (calls <= failing_call) break;
          // A label that is not there is no error.
          const bool label = failed_function.find("Label") != std::string::npos;
          const bool all = !failed || count == 0;
          CHECK(label ? told == "none" : (told == "refused" || told == "error 4: " || !all));
          ++failures[failed_function];
        }
        failing_call = -1;
        if (failed) continue;
        // What does not fit its shape, larger or smaller, and what has no size at all.
        for (const Output& wrong : std::vector<Output>{{"y", kFp32, {1, 3}, 8},
                                                       {"y", kFp32, {1, 3}, 16},
                                                       {"y", kFp32, {1, 3}, 0},
                                                       {"y", kFp32, {0}, 4},
                                                       {"y", kFp32, {-1}, 4},
                                                       {"y", kFp32, {int64_t{1} << 62, 4}, 4},
                                                       {"y", kUint8, {1, 1 << 20}, 1},
                                                       {"y", TRITONSERVER_TYPE_BYTES, {1, 3}, 11},
                                                       {"y", TRITONSERVER_TYPE_INVALID, {4}, 4},
                                                       {"y", static_cast<TRITONSERVER_DataType>(99), {4}, 4}}) {
          answer.outputs = {{"right", kFp32, {1, 3}, 12}, wrong};
          const std::string told = Infer();
          CHECK(count == 0 || told.find("error 1: output 'y' of the response is of ") == 0);
          CHECK(count == 0 || told.find("received " + std::to_string(wrong.size) + " bytes") != std::string::npos);
        }
      }
    }
  }
  // Every function that may fail has failed.
  CHECK(failures.size() == 12);
  std::printf("%zu functions failed\n", failures.size());
  return 0;
}
