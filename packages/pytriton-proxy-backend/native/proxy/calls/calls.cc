#include "calls.h"

#include <algorithm>
#include <stdexcept>

#include "caller.h"
#include "inference.h"

namespace pytriton {

namespace {

// The most connections for calls to one endpoint. Each has a thread, too.
constexpr size_t kMaxCallers = 1024;

}  // namespace

TRITONSERVER_Error* OfferCalls(TRITONBACKEND_Model* model, const ModelIdentity& identity, Endpoint* endpoint) {
  TRITONSERVER_Server* server = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelServer(model, &server); error != nullptr) return error;
  const Settings& settings = endpoint->settings();
  endpoint->OfferCalls(std::make_unique<Calls>(
      CallContext{server, OutputAllocator(), identity, settings.arena_budget_bytes, settings.arena_idle_ms,
                  [endpoint](uint64_t batch, uint32_t index, const auto& use) { endpoint->UseRequest(batch, index, use); }}));
  return nullptr;
}

Calls::~Calls() {
  for (const auto& caller : callers_) caller->Stop();
}

void Calls::Serve(int fd, const std::string& label) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto ended = std::partition(
      callers_.begin(), callers_.end(), [](const auto& caller) { return !caller->ended(); });
  for (auto it = ended; it != callers_.end(); ++it) (*it)->Stop();
  callers_.erase(ended, callers_.end());
  auto caller = std::make_shared<Caller>(fd, label, context_);
  try {
    if (callers_.size() >= kMaxCallers) throw std::runtime_error("too many connections for calls");
    caller->Start();
  } catch (const std::exception& exception) {
    PYTRITON_LOG(ERROR, label + " cannot call: " + exception.what());
    return;
  }
  callers_.push_back(std::move(caller));
}

}  // namespace pytriton
