// The entry points that Triton calls. A bound model has a side file; its versions have one Endpoint each, which is
// created when the model is loaded. A model with a `model.py` has one Endpoint per instance, which is created with the
// instance.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "batch/batch.h"
#include "cache/cache_metrics.h"
#include "cache/core_cache.h"
#include "calls/calls.h"
#include "link/endpoint.h"
#include "python_model.h"
#include "text/json_reader.h"
#include "triton/guard_readiness.h"
#include "triton/triton_util.h"
#include "wire/settings.h"

#define PYTRITON_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr char kBackendName[] = "pytriton";

// Exactly one of the two members is set.
struct Model {
  std::unique_ptr<pytriton::Endpoint> endpoint;
  std::unique_ptr<pytriton::PythonModel> python;
};

struct Instance {
  pytriton::Endpoint* endpoint;
  // Batches may use this after the instance is gone if the endpoint belongs to the model. The endpoint of a `model.py`
  // belongs to the instance and answers all batches before it ends.
  std::shared_ptr<pytriton::InstanceState> state = std::make_shared<pytriton::InstanceState>();
  std::unique_ptr<pytriton::PythonInstance> python;  // set if the endpoint belongs to the instance
};

using pytriton::MakeError;
using pytriton::TakeMessage;

// Runs the body of a C entry point, out of which no exception may go.
template <typename Function>
TRITONSERVER_Error* Guarded(const char* what, Function function) {
  try {
    return function();
  } catch (const std::exception& exception) {
    return MakeError(TRITONSERVER_ERROR_INTERNAL, std::string("pytriton: ") + what + ": " + exception.what());
  }
}

#define PYTRITON_RETURN_IF_ERROR(call)                     \
  do {                                                     \
    TRITONSERVER_Error* pytriton_error = (call);           \
    if (pytriton_error != nullptr) return pytriton_error;  \
  } while (false)

// Names the model that a description file is about, as in "model 'double' version 1". Returns "" if the file is none.
std::string DescribedModel(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  std::string name;
  pytriton::JsonReader(pytriton::JsonMember(text, "name")).String(&name);
  const std::string version(pytriton::JsonMember(text, "version"));
  return name.empty() || version.empty() ? "" : "model '" + name + "' version " + version;
}

// Warns if another model is configured to listen at the same socket, which happens when a model's folder is copied. The
// model that is loaded last gets the socket, and the workers of the other one are refused.
void WarnAboutSharing(const std::string& own, const std::string& description, const pytriton::Settings& settings) {
  const std::string written_for = DescribedModel(description);
  if (!written_for.empty() && written_for != own) {
    PYTRITON_LOG(WARN, own + ": its folder was written for " + written_for + ", whose endpoint '" + settings.endpoint +
                           "' it takes, and whose workers it turns away. Do not copy or rename the folder: add each "
                           "model with pytriton-proxy-backend add");
    return;
  }
  struct stat status;
  if (lstat(settings.endpoint.c_str(), &status) != 0) return;
  const std::string described = DescribedModel(settings.endpoint + ".json");
  if (!described.empty() && described != own) {
    PYTRITON_LOG(WARN, own + ": its endpoint '" + settings.endpoint + "' is that of " + described +
                           " as well, which gets no worker from now on: give each model an endpoint of its own");
  }
}

// Copies the description in the version folder of a drop-in model to a file beside the socket, where workers look for
// it. It is done at this time because the folder of the socket may not have existed when the model was added. Like the
// socket, the copy is readable for the server's user alone.
void PublishDescription(const std::string& source, const std::string& target) {
  std::ifstream file(source);
  if (!file) return;  // this is not a drop-in model, and its owner writes the file
  std::ostringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  std::string scratch = target + ".XXXXXX";
  const int fd = mkostemp(&scratch[0], O_CLOEXEC);  // makes the file with mode 0600
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (fd >= 0) close(fd);
  if (!written || rename(scratch.c_str(), target.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    if (fd >= 0) unlink(scratch.c_str());
    PYTRITON_LOG(WARN, "workers need --description, it cannot be written to '" + target + "': " + reason);
  }
}

// Finds out whether the models of a backend are Python models: those of the backend `python` are, and those of a
// backend that consists of a `model.py`.
TRITONSERVER_Error* HasPythonModels(TRITONBACKEND_Backend* backend, bool* answer) {
  const char* name = nullptr;
  TRITONSERVER_Error* error = TRITONBACKEND_BackendName(backend, &name);
  if (error == nullptr) *answer = std::strcmp(name, kBackendName) != 0;
  return error;
}

// Reads the most rows in a batch from a model's configuration; 0 if Triton does not join requests.
uint64_t MaxRows(const std::string& configuration) {
  const auto has = [&](const char* name) { return !pytriton::JsonMember(configuration, name).empty(); };
  // Without one of these, Triton's default scheduler hands over one request at a time.
  if (!has("dynamic_batching") && !has("sequence_batching")) return 0;
  const std::string rows(pytriton::JsonMember(configuration, "max_batch_size"));
  return std::strtoull(rows.c_str(), nullptr, 10);
}

TRITONSERVER_Error* LoadOwn(
    TRITONBACKEND_Model* model, pytriton::ModelIdentity identity, const std::string& repository, Model* loaded) {
  std::string configuration;
  PYTRITON_RETURN_IF_ERROR(pytriton::ConfigurationOf(model, &configuration));
  identity.max_rows = MaxRows(configuration);
  pytriton::Settings settings;
  const std::string folder = repository + "/" + std::to_string(identity.version) + "/";
  std::string error;
  if (!pytriton::ReadSettings(folder + pytriton::kSideFileName, &settings, &error)) {
    return MakeError(TRITONSERVER_ERROR_INVALID_ARG, error);
  }
  if (settings.decoupled && settings.cache_bytes != 0) {
    return MakeError(
        TRITONSERVER_ERROR_INVALID_ARG,
        "model '" + identity.name + "': the answers of a decoupled model cannot be kept, so cache_bytes has to be 0");
  }
  WarnAboutSharing("model '" + identity.name + "' version " + std::to_string(identity.version),
                   folder + pytriton::kDescriptionName, settings);
  PYTRITON_RETURN_IF_ERROR(pytriton::RefuseCoreCache(
      identity.name, configuration,
      "`cache_bytes = <bytes>` in " + std::string(pytriton::kSideFileName) +
          ", which `pytriton-proxy-backend add --response-cache <bytes>` writes, lets the proxy keep answers"));
  auto endpoint = std::make_unique<pytriton::Endpoint>(identity, settings);
  if (settings.cache_bytes != 0) {
    endpoint->UseCache(std::make_unique<pytriton::ModelCache>(
        settings.cache_bytes, pytriton::NewCacheMetrics(identity.name, identity.version)));
  }
  PYTRITON_RETURN_IF_ERROR(pytriton::OfferCalls(model, identity, endpoint.get()));
  if (!endpoint->Listen(&error)) {
    return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, "model '" + identity.name + "': " + error);
  }
  PublishDescription(folder + pytriton::kDescriptionName, settings.endpoint + ".json");
  loaded->endpoint = std::move(endpoint);
  return nullptr;
}

}  // namespace

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_GetBackendAttribute(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_BackendAttribute* attributes) {
  bool python = false;
  PYTRITON_RETURN_IF_ERROR(HasPythonModels(backend, &python));
  // Instances of bound models load at once, so nothing is gained by loading them in parallel; those of Python models
  // take time.
  return python ? TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(attributes, true) : nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*) {
  uint32_t major = 0;
  uint32_t minor = 0;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != kBackendApiMajor || minor < kBackendApiMinor) {
    return MakeError(
        TRITONSERVER_ERROR_UNSUPPORTED,
        "this server has backend API " + std::to_string(major) + "." + std::to_string(minor) +
            ", libtriton_pytriton.so needs " + std::to_string(kBackendApiMajor) + "." +
            std::to_string(kBackendApiMinor) + " or a later minor: use a newer tritonserver");
  }
  return nullptr;
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return Guarded("loading the model", [&]() -> TRITONSERVER_Error* {
    const char* name = nullptr;
    uint64_t version = 0;
    TRITONBACKEND_ArtifactType artifact;
    const char* repository = nullptr;
    TRITONBACKEND_Backend* backend = nullptr;
    bool python = false;
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelName(model, &name));
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelVersion(model, &version));
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelRepository(model, &artifact, &repository));
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelBackend(model, &backend));
    PYTRITON_RETURN_IF_ERROR(HasPythonModels(backend, &python));
    const pytriton::ModelIdentity identity{name, version};
    auto loaded = std::make_unique<Model>();
    PYTRITON_RETURN_IF_ERROR(
        python ? pytriton::PythonModel::Load(model, backend, identity, repository, &loaded->python)
               : LoadOwn(model, identity, repository, loaded.get()));
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelSetState(model, loaded.get()));
    loaded.release();
    return nullptr;
  });
}

// Triton calls this after a failed load, too. Then there is no model.
PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return Guarded("unloading the model", [&]() -> TRITONSERVER_Error* {
    void* state = nullptr;
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &state));
    delete static_cast<Model*>(state);
    return nullptr;
  });
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  return Guarded("making an instance of the model", [&]() -> TRITONSERVER_Error* {
    TRITONBACKEND_Model* triton_model = nullptr;
    void* state = nullptr;
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceModel(instance, &triton_model));
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelState(triton_model, &state));
    auto* model = static_cast<Model*>(state);
    auto made = std::make_unique<Instance>();
    made->endpoint = model->endpoint.get();
    if (model->python) {
      PYTRITON_RETURN_IF_ERROR(model->python->Start(instance, &made->python));
      made->endpoint = made->python->endpoint();
    }
    // This is read only now because a `model.py` may complete the configuration.
    std::string configuration;
    PYTRITON_RETURN_IF_ERROR(pytriton::ConfigurationOf(triton_model, &configuration));
    made->state->ranks.Read(configuration);
    const char* name = nullptr;
    uint64_t version = 0;
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelName(triton_model, &name));
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelVersion(triton_model, &version));
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceSetState(instance, made.get()));
    const Instance* const known = made.release();
    pytriton::TellGuard(known, model, name, version, [](const void* told) {
      return static_cast<const Instance*>(told)->endpoint->IsReady();
    });
    if (known->endpoint->settings().ignores_parameters) pytriton::TellGuardOfNames(known);
    return nullptr;
  });
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  return Guarded("ending an instance of the model", [&]() -> TRITONSERVER_Error* {
    void* state = nullptr;
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceState(instance, &state));
    pytriton::ForgetInGuard(state);
    const std::unique_ptr<Instance> own(static_cast<Instance*>(state));
    if (own == nullptr) return nullptr;
    own->python.reset();
    own->state->End();
    return nullptr;
  });
}

// Tritonserver 2.64 and later ask this for the readiness of a model; 2.68 and later for that of the server, too.
PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance) {
  return Guarded("asking for readiness", [&]() -> TRITONSERVER_Error* {
    void* state = nullptr;
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceState(instance, &state));
    pytriton::Endpoint* endpoint = static_cast<Instance*>(state)->endpoint;
    if (!endpoint->IsReady()) return MakeError(TRITONSERVER_ERROR_UNAVAILABLE, "no worker is attached");
    const char* name = nullptr;
    PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceName(instance, &name));
    return endpoint->CheckModel(name);
  });
}

PYTRITON_EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t request_count) {
  // If this returns an error, Triton keeps the requests. So errors may be returned only until the batch has taken them
  // over.
  void* state = nullptr;
  PYTRITON_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceState(instance, &state));
  auto* own = static_cast<Instance*>(state);
  pytriton::Endpoint* endpoint = own->endpoint;
  try {
    auto batch = std::make_unique<pytriton::Batch>(
        endpoint->NextBatchId(), instance, requests, request_count, endpoint->settings().batching,
        endpoint->settings().decoupled, endpoint->in_flight(), endpoint->late_ends());
    batch->Use(own->state);
    batch->counts_failures = own->python != nullptr;
    endpoint->Execute(std::move(batch));
  } catch (const std::exception& exception) {
    // The batch was destroyed when the exception left its scope, and its destructor has answered the requests.
    PYTRITON_LOG(ERROR, std::string("executing a batch: ") + exception.what());
  }
  return nullptr;
}
