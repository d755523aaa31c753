// Models written for Triton's Python backend. They run in hosts, one process for each instance, which a supervisor
// outside of the server starts when this library asks for them. Each instance has an endpoint to which its host
// attaches.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control.h"
#include "link/endpoint.h"
#include "triton/triton_api.h"
#include "wire/settings.h"

namespace pytriton {

class PythonModel;

// One instance with its host, from the host's `initialize` to the end of its `finalize`. If the supervisor ends, its
// hosts end with it; the next supervisor at the same socket is then asked for a host.
class PythonInstance {
 public:
  // A question for a host has the fields `about` between the endpoints of the model and of the instance.
  PythonInstance(PythonModel* model, std::vector<std::string> about, const Settings& settings);
  // To be called before its endpoint is destroyed, because the host detaches from it.
  ~PythonInstance();
  PythonInstance(const PythonInstance&) = delete;
  PythonInstance& operator=(const PythonInstance&) = delete;

  Endpoint* endpoint() { return &endpoint_; }

 private:
  friend class PythonModel;

  // Asks for the first host, and starts the thread that asks for another one whenever it is gone.
  TRITONSERVER_Error* Begin(const std::string& model_endpoint);
  // Asks for a host, and waits until it has initialized.
  TRITONSERVER_Error* Ask(const std::string& model_endpoint);
  void Keep();  // that thread, which runs until the instance ends
  bool AskAgain(std::string* error);

  PythonModel* const model_;
  const std::vector<std::string> about_;
  Endpoint endpoint_;
  std::unique_ptr<ControlConnection> control_;
  int stop_fd_ = -1;  // becomes readable when the instance ends
  std::thread keeper_;
};

class PythonModel {
 public:
  // Announces the model to the supervisor, and hands Triton the configuration that its `model.py` has completed.
  static TRITONSERVER_Error* Load(
      TRITONBACKEND_Model* model, TRITONBACKEND_Backend* backend, const ModelIdentity& identity,
      const std::string& folder, std::unique_ptr<PythonModel>* loaded);

  // Returns when the host of the instance has run `initialize` and can attach.
  TRITONSERVER_Error* Start(TRITONBACKEND_ModelInstance* instance, std::unique_ptr<PythonInstance>* started);

 private:
  friend class PythonInstance;

  PythonModel(const ModelIdentity& identity, Settings settings, Frame announcement)
      : identity_(identity), supervisor_(settings.endpoint), settings_(std::move(settings)),
        announcement_(std::move(announcement)) {}
  // Announces the model and returns the completed configuration, or "". Waits for a supervisor.
  TRITONSERVER_Error* Announce(int stop_fd, uint64_t patience_ms, std::string* completed);
  // Announces the model again if the supervisor that knew it has ended. Returns the `settings_` afterwards.
  bool AnnounceAgain(int stop_fd, Settings* settings, std::string* error);
  // Asks a supervisor and waits for its answer. If it answers with an error, that is the load error, word for word.
  TRITONSERVER_Error* Ask(
      ControlConnection* control, const Frame& question, size_t count, int stop_fd,
      std::vector<std::string>* answer) const;
  // Advice for an error: the command that starts the supervisor which cannot be reached.
  std::string Advice() const;
  TRITONSERVER_Error* Unavailable(const std::string& error) const;

  const ModelIdentity identity_;
  const std::string supervisor_;  // the path of the supervisor's socket
  std::mutex mutex_;
  // The settings of its instances, whose endpoints begin with this one. The mutex guards it and what follows.
  Settings settings_;
  Frame announcement_;
  std::unique_ptr<ControlConnection> control_;
  std::atomic<uint64_t> instances_{0};
};

}  // namespace pytriton
