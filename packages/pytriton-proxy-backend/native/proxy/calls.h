// What workers have the server do, each over a connection of its own beside the one for batches: inference with the
// models of the server, loading and unloading them, metrics, records in the log.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "endpoint.h"
#include "readiness.h"
#include "settings.h"
#include "triton_api.h"

namespace pytriton {

class Caller;

// What calls are made with, the same for all workers of an endpoint.
struct CallContext {
  TRITONSERVER_Server* server;
  TRITONSERVER_ResponseAllocator* allocator;
  ModelIdentity model;  // that the workers serve, for the log
  uint64_t arena_budget_bytes;
  uint64_t arena_idle_ms;
  // Calls its last argument with a request that the workers are at, where there is one.
  std::function<void(uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use)> use_request;
  std::shared_ptr<Readiness> readiness = std::make_shared<Readiness>();
};

class Calls : public CallService {
 public:
  explicit Calls(CallContext context) : context_(std::make_shared<const CallContext>(std::move(context))) {}
  // Ends the connections. Inference that goes on is cancelled, and nobody waits for it.
  ~Calls() override;

  void Serve(int fd, const std::string& label) override;
  TRITONSERVER_Error* CheckReady(const std::string& instance) override { return context_->readiness->Check(instance); }

 private:
  const std::shared_ptr<const CallContext> context_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Caller>> callers_;
};

// Lets the workers of an endpoint call into the server of its model.
TRITONSERVER_Error* OfferCalls(TRITONBACKEND_Model* model, const ModelIdentity& identity, Endpoint* endpoint);

}  // namespace pytriton
