// Requests of workers to the server, which come over a connection beside that for batches: inference with other models,
// loading and unloading them, metrics, and records in the log.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../link/endpoint.h"
#include "../triton/readiness.h"
#include "../triton/triton_api.h"
#include "../wire/settings.h"

namespace pytriton {

class Caller;

// What all calls of the workers of one endpoint need.
struct CallContext {
  TRITONSERVER_Server* server;
  TRITONSERVER_ResponseAllocator* allocator;
  ModelIdentity model;  // the model of these workers, for the log
  uint64_t arena_budget_bytes;
  uint64_t arena_idle_ms;
  // Finds a request that a worker works on and calls its last argument with it; does nothing if there is none.
  std::function<void(uint64_t batch, uint32_t index, const std::function<void(TRITONBACKEND_Request*)>& use)> use_request;
  std::shared_ptr<Readiness> readiness = std::make_shared<Readiness>();
};

class Calls : public CallService {
 public:
  explicit Calls(CallContext context) : context_(std::make_shared<const CallContext>(std::move(context))) {}
  // Ends the connections. Inference that is under way is cancelled and not waited for.
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
