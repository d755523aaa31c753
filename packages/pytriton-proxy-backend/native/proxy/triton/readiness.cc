#include "readiness.h"

#include <chrono>
#include <utility>

#include "triton_util.h"

namespace pytriton {

namespace {

// The same as in Triton's Python backend.
constexpr std::chrono::seconds kPatience{5};
const Readiness::Answer kGone{false, "the process of the model ended before it had said whether it is ready"};

}  // namespace

void Readiness::Settle(uint64_t question, Answer answer) {
  if (question == 0 || question != under_way_) return;
  under_way_ = 0;
  answer_ = std::move(answer);
  changed_.notify_all();
}

void Readiness::Wait(const void* worker, std::function<void(uint64_t)> ask, uint64_t answered, Answer answer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (worker == worker_) {
    Settle(answered, std::move(answer));
  } else {
    Settle(under_way_, kGone);
  }
  worker_ = worker;
  ask_ = std::move(ask);
}

void Readiness::Forget(const void* worker) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (worker != worker_) return;
  Settle(under_way_, kGone);
  worker_ = nullptr;
  ask_ = nullptr;
}

TRITONSERVER_Error* Readiness::Check(const std::string& instance) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t question = under_way_;
  if (question == 0) {
    // If no worker waits for a question, the model has no readiness of its own.
    if (!ask_) return nullptr;
    question = under_way_ = ++last_;
    const auto ask = std::move(ask_);
    ask_ = nullptr;
    lock.unlock();
    ask(question);
    lock.lock();
  }
  if (!changed_.wait_until(lock, deadline, [&] { return under_way_ != question; })) {
    return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, "Timed out waiting for user-defined is_ready() response");
  }
  // If several answers have come since, the last one counts.
  if (!answer_.failure.empty()) return MakeError(TRITONSERVER_ERROR_INTERNAL, answer_.failure);
  if (answer_.is_ready) return nullptr;
  return MakeError(
      TRITONSERVER_ERROR_UNAVAILABLE, "Model '" + instance + "' is not ready (user-defined check failed).");
}

}  // namespace pytriton
