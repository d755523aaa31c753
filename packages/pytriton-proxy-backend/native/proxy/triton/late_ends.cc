#include "late_ends.h"

#include <algorithm>
#include <unordered_set>

#include "triton_util.h"

namespace pytriton {

namespace {

// These are never destroyed, because a request may end while the process exits.
std::mutex& inner_mutex = *new std::mutex;
std::unordered_set<const void*>& inner_requests = *new std::unordered_set<const void*>;

}  // namespace

void InnerRequests::Add(const void* request) {
  std::lock_guard<std::mutex> lock(inner_mutex);
  inner_requests.insert(request);
}

void InnerRequests::Remove(const void* request) {
  std::lock_guard<std::mutex> lock(inner_mutex);
  inner_requests.erase(request);
}

bool InnerRequests::Has(const void* request) {
  std::lock_guard<std::mutex> lock(inner_mutex);
  return inner_requests.count(request) != 0;
}

LateEnds::~LateEnds() {
  for (const End& end : ends_) Send(end);
}

void LateEnds::Add(TRITONBACKEND_ResponseFactory* factory) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.push_back({factory, NowNs() + kLateEndNs});
  }
  wake_();
}

uint64_t LateEnds::SendDue(uint64_t now_ns) {
  std::vector<End> due;
  uint64_t next_ns = UINT64_MAX;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto later = std::stable_partition(
        ends_.begin(), ends_.end(), [now_ns](const End& end) { return end.due_ns <= now_ns; });
    due.assign(ends_.begin(), later);
    ends_.erase(ends_.begin(), later);
    for (const End& end : ends_) next_ns = std::min(next_ns, end.due_ns);
  }
  for (const End& end : due) Send(end);
  return next_ns;
}

void LateEnds::Send(const End& end) {
  PYTRITON_LOG_IF_ERROR(
      TRITONBACKEND_ResponseFactorySendFlags(end.factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL),
      "ending a cancelled stream");
  PYTRITON_LOG_IF_ERROR(TRITONBACKEND_ResponseFactoryDelete(end.factory), "response factory");
}

}  // namespace pytriton
