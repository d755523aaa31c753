// Models written for Triton's Python backend, served by hosts: processes that a supervisor outside of the server starts,
// one for each instance. The library asks for them, and each instance has an endpoint for its host to attach to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "control.h"
#include "endpoint.h"
#include "settings.h"
#include "triton_api.h"

namespace pytriton {

// One instance with its host, from the host's `initialize` to the end of its `finalize`.
class PythonInstance {
 public:
  PythonInstance(const ModelIdentity& model, const Settings& settings) : endpoint_(model, settings) {}
  // While its endpoint is still there: the host detaches.
  ~PythonInstance() { control_.Finish(); }

  Endpoint* endpoint() { return &endpoint_; }

 private:
  friend class PythonModel;

  Endpoint endpoint_;
  ControlConnection control_;
};

class PythonModel {
 public:
  // Announces the model to the supervisor, and has Triton take the configuration that its `model.py` completes.
  static TRITONSERVER_Error* Load(
      TRITONBACKEND_Model* model, TRITONBACKEND_Backend* backend, const ModelIdentity& identity,
      const std::string& folder, std::unique_ptr<PythonModel>* loaded);

  // Returns when the host of the instance has initialized and can attach.
  TRITONSERVER_Error* Start(TRITONBACKEND_ModelInstance* instance, std::unique_ptr<PythonInstance>* started);

 private:
  PythonModel(const ModelIdentity& identity, std::string supervisor)
      : identity_(identity), supervisor_(std::move(supervisor)) {}
  TRITONSERVER_Error* Announce(Frame announcement, TRITONBACKEND_Model* model);

  const ModelIdentity identity_;
  const std::string supervisor_;  // path of the supervisor's socket
  ControlConnection control_;
  Settings settings_;
  std::atomic<uint64_t> instances_{0};
};

}  // namespace pytriton
