// Asks a model whether it is ready. The server's question is the answer to a call in which a worker waits for it; the
// worker's answer comes with its next such call.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "triton_api.h"

namespace pytriton {

class Readiness {
 public:
  // What a worker answers. `failure` is the reason why it could not tell, or "".
  struct Answer {
    bool is_ready = false;
    std::string failure;
  };

  // A worker waits for a question, which `ask` sends to it, and has answered the question `answered`; 0 means none.
  void Wait(const void* worker, std::function<void(uint64_t)> ask, uint64_t answered, Answer answer);
  // A worker is gone.
  void Forget(const void* worker);
  // Asks, and returns an error that names `instance` if the model is not ready. Callers that come while a question is
  // open share its answer.
  TRITONSERVER_Error* Check(const std::string& instance);

 private:
  void Settle(uint64_t question, Answer answer);

  std::mutex mutex_;
  std::condition_variable changed_;
  const void* worker_ = nullptr;        // the worker that waits for a question, or has one
  std::function<void(uint64_t)> ask_;   // empty if no worker waits for a question
  uint64_t under_way_ = 0;              // the open question; 0 for none
  uint64_t last_ = 0;
  Answer answer_;                       // the last answer
};

}  // namespace pytriton
