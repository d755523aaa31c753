// Cancels inference that was passed on to Triton's own front end. For that, each such request gets a parameter with a
// name that nobody else knows; the front end sets it on the request in Triton, and so leads to the request.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "../guard/answers/outcomes.h"
#include "inference.h"

struct TRITONSERVER_InferenceRequest;

namespace pytriton::grpc {

class ForwardedRequests {
 public:
  ForwardedRequests();

  // Marks a message of inference, which is passed on with a prefix and not compressed. The returned object cancels its
  // request. `outcome` is null if requests are not counted.
  std::shared_ptr<Running> Mark(std::string* body, std::shared_ptr<guard::RequestOutcome> outcome);

  // To be called when Triton's front end sets a parameter of a request. Returns true if it is the mark, which nobody
  // else must see.
  bool OnParameter(const TRITONSERVER_InferenceRequest* request, const char* name, int64_t value);
  void OnSubmitted(TRITONSERVER_InferenceRequest* request);
  void OnDelete(const TRITONSERVER_InferenceRequest* request);
  // Returns null if the request was not marked, or is not counted.
  std::shared_ptr<guard::RequestOutcome> FindOutcome(const TRITONSERVER_InferenceRequest* request);

 private:
  friend class ForwardedRunning;
  struct Entry {
    const TRITONSERVER_InferenceRequest* made = nullptr;
    TRITONSERVER_InferenceRequest* submitted = nullptr;
    bool is_cancelled = false;
    std::shared_ptr<guard::RequestOutcome> outcome;
  };
  void Cancel(int64_t number);
  void Forget(int64_t number);

  std::string name_;
  std::mutex mutex_;  // guards what follows
  int64_t last_ = 0;
  std::unordered_map<int64_t, Entry> entries_;
  std::unordered_map<const TRITONSERVER_InferenceRequest*, int64_t> numbers_;
  std::atomic<size_t> count_{0};  // the size of numbers_
};

}  // namespace pytriton::grpc
