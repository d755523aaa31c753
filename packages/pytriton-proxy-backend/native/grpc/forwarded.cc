#include "forwarded.h"

#include <random>

#include "../proxy/triton/triton_api.h"
#include "framing.h"
#include "protobuf.h"

#pragma weak TRITONSERVER_ErrorDelete
#pragma weak TRITONSERVER_InferenceRequestCancel

namespace pytriton::grpc {

class ForwardedRunning : public Running {
 public:
  ForwardedRunning(ForwardedRequests* requests, int64_t number) : requests_(requests), number_(number) {}
  ~ForwardedRunning() override { requests_->Forget(number_); }
  void Cancel() override { requests_->Cancel(number_); }

 private:
  ForwardedRequests* const requests_;
  const int64_t number_;
};

ForwardedRequests::ForwardedRequests() : name_("pytriton_call_") {
  std::random_device random;
  for (int i = 0; i < 4; ++i) name_ += std::to_string(random());
}

std::shared_ptr<Running> ForwardedRequests::Mark(std::string* body,
                                                 std::shared_ptr<guard::RequestOutcome> outcome) {
  int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number = ++last_;
    entries_[number].outcome = std::move(outcome);
  }
  // In protobuf, a field that is appended to a message becomes a part of it. In a map, the last entry of a name counts.
  std::string value;
  WriteTag(&value, 2, kVarint);
  WriteVarint(&value, static_cast<uint64_t>(number));
  std::string entry;
  WriteBytes(&entry, 1, name_);
  WriteBytes(&entry, 2, value);
  WriteBytes(body, 4, entry);
  WritePrefix(body->data(), body->size() - kPrefixSize);
  return std::make_shared<ForwardedRunning>(this, number);
}

bool ForwardedRequests::OnParameter(const TRITONSERVER_InferenceRequest* request, const char* name, int64_t value) {
  if (name == nullptr || name_ != name) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(value);
  if (found != entries_.end() && found->second.made == nullptr) {
    found->second.made = request;
    numbers_[request] = value;
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

std::shared_ptr<guard::RequestOutcome> ForwardedRequests::FindOutcome(const TRITONSERVER_InferenceRequest* request) {
  if (count_.load(std::memory_order_relaxed) == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto number = numbers_.find(request);
  const auto found = number == numbers_.end() ? entries_.end() : entries_.find(number->second);
  return found == entries_.end() ? nullptr : found->second.outcome;
}

void ForwardedRequests::OnSubmitted(TRITONSERVER_InferenceRequest* request) {
  if (count_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto number = numbers_.find(request);
  if (number == numbers_.end()) return;
  const auto found = entries_.find(number->second);
  if (found == entries_.end()) return;
  found->second.submitted = request;
  if (!found->second.is_cancelled) return;
  TRITONSERVER_Error* const error = TRITONSERVER_InferenceRequestCancel(request);
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

void ForwardedRequests::OnDelete(const TRITONSERVER_InferenceRequest* request) {
  if (count_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto number = numbers_.find(request);
  if (number == numbers_.end()) return;
  entries_.erase(number->second);
  numbers_.erase(number);
  count_.fetch_sub(1, std::memory_order_relaxed);
}

void ForwardedRequests::Cancel(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(number);
  if (found == entries_.end() || std::exchange(found->second.is_cancelled, true)) return;
  if (found->second.submitted == nullptr) return;
  TRITONSERVER_Error* const error = TRITONSERVER_InferenceRequestCancel(found->second.submitted);
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

// The call has ended. If it was refused before it became a request, nothing is left of it.
void ForwardedRequests::Forget(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(number);
  if (found != entries_.end() && found->second.made == nullptr) entries_.erase(found);
}

}  // namespace pytriton::grpc
