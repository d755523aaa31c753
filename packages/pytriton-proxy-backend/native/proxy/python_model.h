// Models written for Triton's Python backend, served by hosts: processes that a supervisor outside of the server starts,
// one for each instance. The library asks for them, and each instance has an endpoint for its host to attach to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control.h"
#include "endpoint.h"
#include "settings.h"
#include "triton_api.h"

namespace pytriton {

class PythonModel;

// One instance with its host, from the host's `initialize` to the end of its `finalize`. Where the supervisor has ended,
// and its hosts with it, the next one that listens in its place is asked for a host.
class PythonInstance {
 public:
  // The fields of a question for its host are `about` between the model's endpoint and its own.
  PythonInstance(PythonModel* model, std::vector<std::string> about, const Settings& settings);
  // While its endpoint is still there: the host detaches.
  ~PythonInstance();
  PythonInstance(const PythonInstance&) = delete;
  PythonInstance& operator=(const PythonInstance&) = delete;

  Endpoint* endpoint() { return &endpoint_; }

 private:
  friend class PythonModel;

  // Asks for the first host, and begins to keep the instance supplied with one.
  TRITONSERVER_Error* Begin(const std::string& model_endpoint);
  // Asks for a host, and waits until it has initialized.
  TRITONSERVER_Error* Ask(const std::string& model_endpoint);
  void Keep();  // the thread: keeps it supplied with a host until the instance ends
  bool AskAgain(std::string* error);

  PythonModel* const model_;
  const std::vector<std::string> about_;
  Endpoint endpoint_;
  std::unique_ptr<ControlConnection> control_;
  int stop_fd_ = -1;  // readable when the instance ends
  std::thread keeper_;
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
  friend class PythonInstance;

  PythonModel(const ModelIdentity& identity, Settings settings, Frame announcement)
      : identity_(identity), supervisor_(settings.endpoint), settings_(std::move(settings)),
        announcement_(std::move(announcement)) {}
  // Announces the model, and gives the configuration that was completed, or nothing. Waits for a supervisor.
  TRITONSERVER_Error* Announce(int stop_fd, uint64_t patience_ms, std::string* completed);
  // Announces it once more where the supervisor that knew it has ended; gives what `settings_` are then.
  bool AnnounceAgain(int stop_fd, Settings* settings, std::string* error);
  // Asks a supervisor and waits for its answer. An error of it is the load error, word for word.
  TRITONSERVER_Error* Ask(
      ControlConnection* control, const Frame& question, size_t count, int stop_fd,
      std::vector<std::string>* answer) const;
  // Advice for an error: which command starts the supervisor that cannot be reached.
  std::string Advice() const;
  TRITONSERVER_Error* Unavailable(const std::string& error) const;

  const ModelIdentity identity_;
  const std::string supervisor_;  // path of its socket
  std::mutex mutex_;
  // Those of its instances, whose endpoints begin with its endpoint. Guarded by the mutex, as what follows.
  Settings settings_;
  Frame announcement_;
  std::unique_ptr<ControlConnection> control_;
  std::atomic<uint64_t> instances_{0};
};

}  // namespace pytriton
