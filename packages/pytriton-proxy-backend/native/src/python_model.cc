#include "python_model.h"

#include <sys/un.h>
#include <unistd.h>

#include <climits>
#include <utility>

#include "calls.h"
#include "triton_util.h"

namespace pytriton {

namespace {

// In the folder of the backend `python`: a link to the supervisor's socket.
constexpr char kSupervisorLink[] = "pytriton-hosts";

// Where the supervisor listens; empty where there is none. `folder` is that of the backend, or of one whose models are
// Python models as well, in which case it lies beside that of the backend `python`.
std::string FindSupervisor(const std::string& folder) {
  const std::string beside = folder.substr(0, folder.find_last_of('/') + 1) + "python";
  for (const std::string& place : {folder, beside}) {
    char target[PATH_MAX];
    const ssize_t length = readlink((place + "/" + kSupervisorLink).c_str(), target, sizeof(target));
    if (length > 0) return std::string(target, static_cast<size_t>(length));
  }
  return "";
}

// The JSON text of a message.
TRITONSERVER_Error* TextOf(TRITONSERVER_Message* message, std::string* text) {
  const char* base = nullptr;
  size_t size = 0;
  TRITONSERVER_Error* error = TRITONSERVER_MessageSerializeToJson(message, &base, &size);
  if (error == nullptr) text->assign(base, size);
  return error;
}

TRITONSERVER_Error* ConfigurationOf(TRITONBACKEND_Model* model, std::string* text) {
  TRITONSERVER_Message* message = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelConfig(model, kConfigVersion, &message)) return error;
  TRITONSERVER_Error* error = TextOf(message, text);
  PYTRITON_LOG_IF_ERROR(TRITONSERVER_MessageDelete(message), "deleting a message");
  return error;
}

TRITONSERVER_Error* SetConfiguration(TRITONBACKEND_Model* model, const std::string& text) {
  TRITONSERVER_Message* message = nullptr;
  if (auto* error = TRITONSERVER_MessageNewFromSerializedJson(&message, text.data(), text.size())) return error;
  TRITONSERVER_Error* error = TRITONBACKEND_ModelSetConfig(model, kConfigVersion, message);
  PYTRITON_LOG_IF_ERROR(TRITONSERVER_MessageDelete(message), "deleting a message");
  return error;
}

// Asks and waits for the answer. An error of the supervisor is the load error, word for word.
TRITONSERVER_Error* Ask(
    ControlConnection* control, const std::string& supervisor, const Frame& question, size_t count,
    std::vector<std::string>* answer) {
  std::string error;
  Frame frame;
  if (!control->Connect(supervisor, &error) || !control->Send(question, &error) || !control->Receive(&frame, &error)) {
    return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, "no process can be had for a Python model: " + error);
  }
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

}  // namespace

TRITONSERVER_Error* PythonModel::Load(
    TRITONBACKEND_Model* model, TRITONBACKEND_Backend* backend, const ModelIdentity& identity,
    const std::string& folder, std::unique_ptr<PythonModel>* loaded) {
  const char* name = nullptr;
  const char* place = nullptr;
  TRITONBACKEND_ArtifactType artifact;
  TRITONSERVER_Message* settings = nullptr;
  bool completes = false;
  std::string configuration, command_line;
  if (auto* error = TRITONBACKEND_BackendName(backend, &name)) return error;
  if (auto* error = TRITONBACKEND_BackendArtifacts(backend, &artifact, &place)) return error;
  if (auto* error = TRITONBACKEND_BackendConfig(backend, &settings)) return error;
  if (auto* error = TextOf(settings, &command_line)) return error;
  if (auto* error = TRITONBACKEND_ModelAutoCompleteConfig(model, &completes)) return error;
  if (auto* error = ConfigurationOf(model, &configuration)) return error;
  const std::string supervisor = FindSupervisor(place);
  if (supervisor.empty()) {
    return MakeError(
        TRITONSERVER_ERROR_UNAVAILABLE,
        std::string("no ") + place + "/" + kSupervisorLink + ": nobody starts processes for models of the backend '" +
            name + "' here. Start the server with `pytriton serve-repository`, or give it Triton's Python backend");
  }
  std::unique_ptr<PythonModel> announced(new PythonModel(identity, supervisor));
  Frame announcement{FrameKind::kModel,
                     {identity.name, std::to_string(identity.version), folder, configuration, command_line,
                      completes ? "1" : "", name, place}};
  if (auto* error = announced->Announce(std::move(announcement), model)) return error;
  *loaded = std::move(announced);
  return nullptr;
}

TRITONSERVER_Error* PythonModel::Announce(Frame announcement, TRITONBACKEND_Model* model) {
  std::vector<std::string> answer;
  if (auto* error = Ask(&control_, supervisor_, announcement, 2, &answer)) return error;
  std::string reason;
  if (!ParseSettings(answer[1], &settings_, &reason)) return MakeError(TRITONSERVER_ERROR_INTERNAL, reason);
  return answer[0].empty() ? nullptr : SetConfiguration(model, answer[0]);
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
  Settings settings = settings_;
  settings.endpoint += "." + std::to_string(++instances_);
  if (settings.endpoint.size() >= sizeof(sockaddr_un::sun_path)) {
    return MakeError(
        TRITONSERVER_ERROR_UNAVAILABLE,
        "the path of a socket is too long: '" + settings.endpoint + "'; choose a shorter workspace");
  }
  auto made = std::make_unique<PythonInstance>(identity_, settings);
  if (auto* error = OfferCalls(model, identity_, &made->endpoint_)) return error;
  std::string reason;
  if (!made->endpoint_.Listen(&reason)) {
    return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, "model '" + identity_.name + "': " + reason);
  }
  const Frame question{FrameKind::kInstance,
                       {settings_.endpoint, name, TRITONSERVER_InstanceGroupKindString(kind), std::to_string(device),
                        settings.endpoint}};
  std::vector<std::string> nothing;
  if (auto* error = Ask(&made->control_, supervisor_, question, 0, &nothing)) return error;
  *started = std::move(made);
  return nullptr;
}

}  // namespace pytriton
