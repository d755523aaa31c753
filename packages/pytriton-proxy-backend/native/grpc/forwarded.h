// Inference that was handed on to Triton's own front end, and how it is cancelled all the same: by a parameter of the
// request whose name nobody else knows, which that front end sets on the request in Triton.
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

  // Marks a message of inference, which goes on with a prefix and not compressed. What is returned cancels its request.
  // Null for `outcome` where nothing is counted.
  std::shared_ptr<Running> Mark(std::string* body, std::shared_ptr<guard::RequestOutcome> outcome);

  // What Triton's front end does with its requests. True: the parameter is the mark, and nobody else is to see it.
  bool OnParameter(const TRITONSERVER_InferenceRequest* request, const char* name, int64_t value);
  void OnSubmitted(TRITONSERVER_InferenceRequest* request);
  void OnDelete(const TRITONSERVER_InferenceRequest* request);
  // Null for a request that was not marked, or is not counted.
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
  std::mutex mutex_;  // of what follows
  int64_t last_ = 0;
  std::unordered_map<int64_t, Entry> entries_;
  std::unordered_map<const TRITONSERVER_InferenceRequest*, int64_t> numbers_;
  std::atomic<size_t> count_{0};  // of numbers_
};

}  // namespace pytriton::grpc
