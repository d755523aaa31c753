// Requests of this process to Triton, from their submission to their last response. Triton's threads read the
// responses, put them into a queue for each request, independent of Triton, and wake whoever waits, all without the
// GIL. Python is called only for the events that it asked for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../proxy/triton/triton_util.h"
#include "instance_fields.h"

namespace pytriton {

// Is called for the events with which a request was submitted, and for its completion unless `Take` has reported it.
using EventCallback = void (*)(uint64_t number, uint32_t events);

struct FreeMemory {
  void operator()(void* memory) const { free(memory); }
};
using Memory = std::unique_ptr<void, FreeMemory>;

struct InputTensor {
  const char* name;
  TRITONSERVER_DataType type;
  const int64_t* dims;
  uint64_t dims_count;
  const void* data;
  size_t size;
  TRITONSERVER_MemoryType memory_type;
  int64_t device;
};

struct OutputTensor {
  std::string name;
  TRITONSERVER_DataType type;
  std::vector<int64_t> dims;
  size_t size;
  Memory memory;       // the memory before the elements; null for an empty output, and if they are not in host memory
  void* data;          // the elements: `kOutputOffset` bytes into `memory`, or on a device
};

// Before the elements of an output, in the same memory, lies a header with the owner of the memory.
constexpr size_t kOutputOffset = 64;

struct ReceivedParameter {
  std::string key;
  TRITONSERVER_ParameterType type;
  std::string text;
  int64_t number = 0;
  double real = 0;
};

// A response that is independent of Triton.
struct ReceivedResponse {
  bool final = false;
  bool cancelled = false;  // stands for the responses of a cancelled request, for which nobody waits
  bool completed = false;  // the request has ended, and Python is told only by this
  int64_t version = 0;
  std::string model;
  std::vector<ReceivedParameter> parameters;
  bool failed = false;
  int error_code = 0;
  std::string error;
  std::vector<OutputTensor> outputs;
  std::string label;  // the label of the largest value
};

// One request. It is owned by Python until that drops it, and by Triton until it has released the request and has sent
// the last response, which may come in any order.
class PendingRequest {
 public:
  explicit PendingRequest(uint64_t number) : number_(number) {}
  PendingRequest(const PendingRequest&) = delete;
  PendingRequest& operator=(const PendingRequest&) = delete;

  // Makes Triton's request. The memory of the inputs must stay until the request is released or withdrawn.
  TRITONSERVER_Error* Create(
      TRITONSERVER_Server* server, const char* model, int64_t version, const std::vector<InputTensor>& inputs);
  TRITONSERVER_InferenceRequest* request() const { return request_; }
  // Returns memory for inputs that are copied, which lives as long as the request.
  uint8_t* Reserve(size_t length);

  // Hands the request to Triton. `allocator` is null for outputs in host memory. If Triton does not accept it, it is
  // withdrawn.
  TRITONSERVER_Error* Submit(
      TRITONSERVER_Server* server, TRITONSERVER_InferenceTrace* trace, TRITONSERVER_ResponseAllocator* allocator,
      uint32_t events);
  // Deletes a request that Triton does not have. Returns false, and does nothing, if Triton has it.
  bool Withdraw();

  enum class Taken { kResponse, kNothingYet, kNothingMore };
  // Whether `Take` would not wait.
  bool HasArrived() const { return arrived_.load(std::memory_order_acquire); }
  // Waits for the next response.
  Taken Take(int64_t timeout_ns, std::unique_ptr<ReceivedResponse>* response);

  // Ends the wait for responses and asks Triton to stop. Returns whether the request has ended; if not, Python is told
  // when it does.
  bool Cancel();

  // Drops the reference of one of its owners.
  void Unref();

 private:
  ~PendingRequest() = default;

  static void OnResponse(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* userp);
  static void OnRelease(TRITONSERVER_InferenceRequest* request, uint32_t flags, void* userp);

  // Puts a response into the queue, unless the last one is in it already: that of a cancelled request comes before
  // Triton's. Called with the lock; the caller wakes the waiting threads afterwards.
  bool Enqueue(std::unique_ptr<ReceivedResponse> response);
  void Complete(TRITONSERVER_InferenceRequest* request);
  void Spin(uint64_t begin_ns) const;

  const uint64_t number_;
  uint32_t events_ = 0;
  Memory copies_;
  std::atomic<int> owners_{1};
  std::atomic<bool> arrived_{false};  // tells threads that wait without the lock to look again
  std::mutex mutex_;
  std::condition_variable changed_;
  // The lock guards everything below.
  TRITONSERVER_InferenceRequest* request_ = nullptr;
  std::list<std::unique_ptr<ReceivedResponse>> responses_;  // a list, because an empty one takes no memory
  bool submitted_ = false;
  bool released_ = false;
  bool answered_ = false;
  bool ended_ = false;
  bool cancelled_ = false;
  bool closed_ = false;  // nothing more comes into the queue
  bool tell_completed_ = false;
};

// Makes the allocator for outputs in host memory, once.
TRITONSERVER_Error* MakeHostAllocator();

// Sets the function that is called with events. With null, no event is reported after this returns, except by calls
// that have begun.
void SetEventCallback(EventCallback callback);

}  // namespace pytriton
