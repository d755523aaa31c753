#include "python_model.h"

#include <sys/eventfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <utility>

#include "cache/cache_metrics.h"
#include "cache/core_cache.h"
#include "calls/calls.h"
#include "text/errno_text.h"
#include "triton/triton_util.h"

namespace pytriton {

namespace {

// The places of fields in an announcement, see `FrameKind`.
constexpr size_t kConfiguration = 3;
constexpr size_t kCompletes = 5;
constexpr int kConnectAgainMs = 100;
// The longest pause between two questions for a host. It is doubled each time.
constexpr int kMaxPauseMs = 2000;

// Returns the file with the socket of the supervisor. Whoever started the server names it in the environment if it also
// starts the processes; otherwise it lies in the library's folder.
std::string HostsFile(const std::string& folder) {
  const char* told = std::getenv(kHostsVariable);
  return told != nullptr && *told != '\0' ? told : folder + "/" + kHostsFileName;
}

// Makes a path absolute, because the supervisor has another working directory.
std::string Absolute(const std::string& path) {
  char folder[PATH_MAX];
  if (IsAbsolutePath(path) || getcwd(folder, sizeof(folder)) == nullptr) return path;
  return std::string(folder) + "/" + path;
}

TRITONSERVER_Error* SetConfiguration(TRITONBACKEND_Model* model, const std::string& text) {
  TRITONSERVER_Message* message = nullptr;
  if (auto* error = TRITONSERVER_MessageNewFromSerializedJson(&message, text.data(), text.size())) return error;
  TRITONSERVER_Error* error = TRITONBACKEND_ModelSetConfig(model, kConfigVersion, message);
  PYTRITON_LOG_IF_ERROR(TRITONSERVER_MessageDelete(message), "deleting a message");
  return error;
}

}  // namespace

// ---- the model ------------------------------------------------------------------------------------------------------

TRITONSERVER_Error* PythonModel::Load(
    TRITONBACKEND_Model* model, TRITONBACKEND_Backend* backend, const ModelIdentity& identity,
    const std::string& folder, std::unique_ptr<PythonModel>* loaded) {
  const char* name = nullptr;
  const char* place = nullptr;
  TRITONBACKEND_ArtifactType artifact;
  TRITONSERVER_Message* command_line_settings = nullptr;
  bool completes = false;
  std::string configuration, command_line, completed, reason;
  if (auto* error = TRITONBACKEND_BackendName(backend, &name)) return error;
  if (auto* error = TRITONBACKEND_BackendArtifacts(backend, &artifact, &place)) return error;
  if (auto* error = TRITONBACKEND_BackendConfig(backend, &command_line_settings)) return error;
  if (auto* error = TextOf(command_line_settings, &command_line)) return error;
  if (auto* error = TRITONBACKEND_ModelAutoCompleteConfig(model, &completes)) return error;
  if (auto* error = ConfigurationOf(model, &configuration)) return error;
  if (auto* error = RefuseCoreCache(
          identity.name, configuration,
          "a parameter PYTRITON_RESPONSE_CACHE_BYTES, with a number of bytes, lets the server keep answers")) {
    return error;
  }
  const std::string file = HostsFile(place);
  if (access(file.c_str(), F_OK) != 0) {
    return MakeError(
        TRITONSERVER_ERROR_UNAVAILABLE,
        "no " + file + ": nobody starts processes for models of the backend '" +
            name + "' here. Start the server with `pytriton serve-repository`, or give it Triton's Python backend");
  }
  Settings settings;
  if (!ReadSettings(file, &settings, &reason)) return MakeError(TRITONSERVER_ERROR_INVALID_ARG, reason);
  Frame announcement{FrameKind::kModel,
                     {identity.name, std::to_string(identity.version), Absolute(folder), configuration, command_line,
                      completes ? "1" : "", name, Absolute(place)}};
  std::unique_ptr<PythonModel> announced(
      new PythonModel(identity, std::move(settings), std::move(announcement)));
  if (auto* error = announced->Announce(-1, announced->settings_.attach_timeout_ms, &completed)) return error;
  if (!completed.empty()) {
    if (auto* error = SetConfiguration(model, completed)) return error;
    announced->announcement_.fields[kConfiguration] = completed;
  }
  // The next supervisor must serve the configuration as it was completed, not complete it again.
  announced->announcement_.fields[kCompletes].clear();
  *loaded = std::move(announced);
  return nullptr;
}

TRITONSERVER_Error* PythonModel::Announce(int stop_fd, uint64_t patience_ms, std::string* completed) {
  const uint64_t deadline_ns = NowNs() + patience_ms * kMillisecond;
  auto control = std::make_unique<ControlConnection>();
  std::string error;
  for (bool is_told = false; !control->Connect(supervisor_, &error);) {
    if (NowNs() >= deadline_ns) return Unavailable(error);
    if (!is_told) PYTRITON_LOG(WARN, "model '" + identity_.name + "' waits for a process: " + error + Advice());
    is_told = true;
    usleep(kConnectAgainMs * 1000);
  }
  std::vector<std::string> answer;
  if (auto* refused = Ask(control.get(), announcement_, 2, stop_fd, &answer)) return refused;
  // Settings that the model does not have come from the file beside the library.
  Settings told = settings_;
  if (!ParseSettings(answer[1], &told, &error)) return MakeError(TRITONSERVER_ERROR_INTERNAL, error);
  settings_ = std::move(told);
  control_ = std::move(control);
  *completed = answer[0];
  return nullptr;
}

bool PythonModel::AnnounceAgain(int stop_fd, Settings* settings, std::string* error) {
  // Another instance may hold the mutex for long, and must not keep this one from ending.
  while (!mutex_.try_lock()) {
    if (WaitReadable(stop_fd, kConnectAgainMs)) return false;
  }
  std::lock_guard<std::mutex> lock(mutex_, std::adopt_lock);
  std::string completed;
  if (control_->HasEnded() && Failed(Announce(stop_fd, 0, &completed), error)) return false;
  *settings = settings_;
  return true;
}

TRITONSERVER_Error* PythonModel::Ask(
    ControlConnection* control, const Frame& question, size_t count, int stop_fd,
    std::vector<std::string>* answer) const {
  std::string error;
  Frame frame;
  if (!control->Send(question, &error) || !control->Receive(&frame, &error, stop_fd)) return Unavailable(error);
  if (frame.kind == FrameKind::kError && frame.fields.size() == 1) {
    return MakeError(TRITONSERVER_ERROR_INTERNAL, frame.fields[0]);
  }
  if (frame.kind != FrameKind::kOk || frame.fields.size() != count) {
    return MakeError(
        TRITONSERVER_ERROR_INTERNAL,
        "expected an answer with " + std::to_string(count) + " fields of the process that supervises Python models, " +
            "got kind " + std::to_string(static_cast<unsigned>(frame.kind)) + " with " +
            std::to_string(frame.fields.size()));
  }
  *answer = std::move(frame.fields);
  return nullptr;
}

std::string PythonModel::Advice() const {
  const std::string folder = supervisor_.substr(0, supervisor_.find_last_of('/'));
  return " (is `pytriton-proxy-backend hosts --endpoint " + folder + "` running, as user " +
         std::to_string(geteuid()) + "?)";
}

TRITONSERVER_Error* PythonModel::Unavailable(const std::string& error) const {
  return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, "no process can be had for a Python model: " + error + Advice());
}

TRITONSERVER_Error* PythonModel::Start(TRITONBACKEND_ModelInstance* instance, std::unique_ptr<PythonInstance>* started) {
  const char* name = nullptr;
  TRITONSERVER_InstanceGroupKind kind;
  int32_t device = 0;
  TRITONBACKEND_Model* model = nullptr;
  if (auto* error = TRITONBACKEND_ModelInstanceModel(instance, &model)) return error;
  if (auto* error = TRITONBACKEND_ModelInstanceName(instance, &name)) return error;
  if (auto* error = TRITONBACKEND_ModelInstanceKind(instance, &kind)) return error;
  if (auto* error = TRITONBACKEND_ModelInstanceDeviceId(instance, &device)) return error;
  std::string reason;
  Settings settings;
  // The supervisor to which the model was announced may have ended meanwhile.
  if (!AnnounceAgain(-1, &settings, &reason)) return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, reason);
  const std::string model_endpoint = settings.endpoint;
  settings.endpoint += "." + std::to_string(++instances_);
  if (settings.endpoint.size() >= sizeof(sockaddr_un::sun_path)) {
    return MakeError(
        TRITONSERVER_ERROR_UNAVAILABLE,
        "the path of a socket is too long: '" + settings.endpoint + "'; choose a shorter workspace");
  }
  auto made = std::make_unique<PythonInstance>(
      this, std::vector<std::string>{name, TRITONSERVER_InstanceGroupKindString(kind), std::to_string(device)},
      settings);
  if (auto* error = OfferCalls(model, identity_, &made->endpoint_)) return error;
  if (settings.cache_bytes != 0) {
    made->endpoint_.UseCache(
        std::make_unique<ModelCache>(settings.cache_bytes, NewCacheMetrics(identity_.name, identity_.version)));
  }
  if (!made->endpoint_.Listen(&reason)) {
    return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, "model '" + identity_.name + "': " + reason);
  }
  if (auto* error = made->Begin(model_endpoint)) return error;
  *started = std::move(made);
  return nullptr;
}

// ---- an instance ----------------------------------------------------------------------------------------------------

PythonInstance::PythonInstance(PythonModel* model, std::vector<std::string> about, const Settings& settings)
    : model_(model), about_(std::move(about)), endpoint_(model->identity_, settings) {}

PythonInstance::~PythonInstance() {
  if (keeper_.joinable()) {
    eventfd_write(stop_fd_, 1);
    keeper_.join();
  } else if (control_) {
    control_->Finish();
  }
  if (stop_fd_ >= 0) close(stop_fd_);
}

TRITONSERVER_Error* PythonInstance::Begin(const std::string& model_endpoint) {
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  if (stop_fd_ < 0) return model_->Unavailable(Errno("eventfd"));
  if (auto* error = Ask(model_endpoint)) return error;
  keeper_ = std::thread([this] { Keep(); });
  return nullptr;
}

TRITONSERVER_Error* PythonInstance::Ask(const std::string& model_endpoint) {
  std::string error;
  control_ = std::make_unique<ControlConnection>();
  if (!control_->Connect(model_->supervisor_, &error)) return model_->Unavailable(error);
  Frame question{FrameKind::kInstance, {model_endpoint}};
  question.fields.insert(question.fields.end(), about_.begin(), about_.end());
  question.fields.push_back(endpoint_.settings().endpoint);
  std::vector<std::string> nothing;
  return model_->Ask(control_.get(), question, 0, stop_fd_, &nothing);
}

bool PythonInstance::AskAgain(std::string* error) {
  Settings settings;
  return model_->AnnounceAgain(stop_fd_, &settings, error) && !Failed(Ask(settings.endpoint), error);
}

void PythonInstance::Keep() {
  const std::string who = "instance '" + about_[0] + "': ";
  while (control_->WaitEnd(stop_fd_)) {
    PYTRITON_LOG(WARN, who + "the process that has started its host is gone, and the host with it");
    std::string error;
    std::string told;
    for (int pause_ms = kConnectAgainMs; !AskAgain(&error); pause_ms = std::min(2 * pause_ms, kMaxPauseMs)) {
      endpoint_.SetAbsence(error);
      if (error != told) PYTRITON_LOG(WARN, who + error);
      told = error;
      if (WaitReadable(stop_fd_, pause_ms)) break;
    }
    endpoint_.SetAbsence("");
    if (!WaitReadable(stop_fd_, 0)) PYTRITON_LOG(INFO, who + "it has a host again");
  }
  control_->Finish();
}

}  // namespace pytriton
