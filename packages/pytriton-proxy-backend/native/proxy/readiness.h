// Whether a model says of itself that it is ready: a question of the server, which a worker that answers it waits for in
// a call of its own. The answer comes with the next such call.
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
  // What a worker says of its model: nothing in `failure` where it could say it.
  struct Answer {
    bool is_ready = false;
    std::string failure;
  };

  // A worker waits for a question, which `ask` sends to it, and has answered question `answered`, 0 for none.
  void Wait(const void* worker, std::function<void(uint64_t)> ask, uint64_t answered, Answer answer);
  // A worker is gone.
  void Forget(const void* worker);
  // Asks. An error where the model is not ready; `instance` names it. Whoever comes while a question is under way shares
  // its answer.
  TRITONSERVER_Error* Check(const std::string& instance);

 private:
  void Settle(uint64_t question, Answer answer);

  std::mutex mutex_;
  std::condition_variable changed_;
  const void* worker_ = nullptr;        // who waits for a question, or has one
  std::function<void(uint64_t)> ask_;   // empty where nobody waits for one
  uint64_t under_way_ = 0;              // the question that is not answered; 0 for none
  uint64_t last_ = 0;
  Answer answer_;                       // to the last one that was
};

}  // namespace pytriton
