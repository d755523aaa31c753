// Requests of the process to Triton, from their submission to their last response. Triton's threads leave what comes in
// a queue for each request, read and independent of Triton, and wake whoever waits there: none of that takes the GIL.
// Python is called only for what it asked to be told.
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

#include "../proxy/triton_util.h"
#include "instance_fields.h"

namespace pytriton {

// Gets the events that a request was submitted with, and its completion where `Take` did not tell.
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
  Memory memory;       // what begins with the elements; null for an empty output, and where they are not in host memory
  void* data;          // where the elements are: `kOutputOffset` bytes into `memory`, or on a device
};

// Before the elements of an output, in the same memory, comes what says to whom that belongs.
constexpr size_t kOutputOffset = 64;

struct ReceivedParameter {
  std::string key;
  TRITONSERVER_ParameterType type;
  std::string text;
  int64_t number = 0;
  double real = 0;
};

// A response, without anything of Triton's.
struct ReceivedResponse {
  bool final = false;
  bool cancelled = false;  // stands for the responses that nobody waits for any more
  bool completed = false;  // the request has ended, which Python is not told in any other way
  int64_t version = 0;
  std::string model;
  std::vector<ReceivedParameter> parameters;
  bool failed = false;
  int error_code = 0;
  std::string error;
  std::vector<OutputTensor> outputs;
  std::string label;  // of the largest value
};

// One request. It belongs to Python, which drops it, and to Triton until both of its ends: that Triton has released the
// request, and has given its last response. They come in any order.
class PendingRequest {
 public:
  explicit PendingRequest(uint64_t number) : number_(number) {}
  PendingRequest(const PendingRequest&) = delete;
  PendingRequest& operator=(const PendingRequest&) = delete;

  // Makes Triton's request. The memory of the inputs must stay until it is released or withdrawn.
  TRITONSERVER_Error* Create(
      TRITONSERVER_Server* server, const char* model, int64_t version, const std::vector<InputTensor>& inputs);
  TRITONSERVER_InferenceRequest* request() const { return request_; }
  // Memory for inputs that are copied. Lives as long as the request.
  uint8_t* Reserve(size_t length);

  // Gives the request to Triton. `allocator` is null for outputs in host memory. One that is not accepted is withdrawn.
  TRITONSERVER_Error* Submit(
      TRITONSERVER_Server* server, TRITONSERVER_InferenceTrace* trace, TRITONSERVER_ResponseAllocator* allocator,
      uint32_t events);
  // Deletes a request that Triton has not got, or has not accepted. Returns false, and does nothing, for any other one.
  bool Withdraw();

  enum class Taken { kResponse, kNothingYet, kNothingMore };
  // Whether `Take` would not wait.
  bool HasArrived() const { return arrived_.load(std::memory_order_acquire); }
  // Waits for the next response.
  Taken Take(int64_t timeout_ns, std::unique_ptr<ReceivedResponse>* response);

  // Ends the wait for responses and asks Triton to stop the work. Returns whether the request has ended; else Python is
  // told when it does.
  bool Cancel();

  // Lets go of it, for one of its owners.
  void Unref();

 private:
  ~PendingRequest() = default;

  static void OnResponse(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* userp);
  static void OnRelease(TRITONSERVER_InferenceRequest* request, uint32_t flags, void* userp);

  // Puts a response into the queue, unless its last one is there: that of a cancelled request comes before Triton's.
  // With the lock; whoever holds it wakes those that wait afterwards.
  bool Enqueue(std::unique_ptr<ReceivedResponse> response);
  void Complete(TRITONSERVER_InferenceRequest* request);
  void Spin(uint64_t begin_ns) const;

  const uint64_t number_;
  uint32_t events_ = 0;
  Memory copies_;
  std::atomic<int> owners_{1};
  std::atomic<bool> arrived_{false};  // for those that wait without the lock: look again
  std::mutex mutex_;
  std::condition_variable changed_;
  // All below: with the lock.
  TRITONSERVER_InferenceRequest* request_ = nullptr;
  std::list<std::unique_ptr<ReceivedResponse>> responses_;  // takes no memory before the first one
  bool submitted_ = false;
  bool released_ = false;
  bool answered_ = false;
  bool ended_ = false;
  bool cancelled_ = false;
  bool closed_ = false;  // nothing more comes into the queue
  bool tell_completed_ = false;
};

// Makes the allocator of outputs in host memory, once.
TRITONSERVER_Error* MakeHostAllocator();

// Sets what is told of requests; null for nobody, from when it returns on but for calls that are in progress.
void SetEventCallback(EventCallback callback);

}  // namespace pytriton
