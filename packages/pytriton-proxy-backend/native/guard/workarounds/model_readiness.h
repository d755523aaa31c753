// Which models nobody serves, according to their backend.
//
// Bug: tritonserver does not ask a backend whether a model is ready, and reports one without workers as ready.
// Until: 2.64 for the readiness of a model, 2.68 for that of the server.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

namespace pytriton::guard {

// Returns whether an instance of a model has a worker. It is not called any more once the instance is removed.
using IsServed = bool (*)(const void* instance);

class ModelReadiness {
 public:
  void Add(const void* instance, const void* model, const char* name, uint64_t version, IsServed is_served);
  // Nobody who serves the instance reads the parameters of requests.
  void IgnoreParameters(const void* instance);
  void Remove(const void* instance);
  // Whether a version is known to read the parameters of requests, or may; -1 is the newest version.
  bool HasParameters(const std::string& name, int64_t version);
  // Whether a version has an instance without a worker; -1 is the newest. False for a model of another backend. If a
  // model is loaded twice, because another configuration takes over, one complete load is enough.
  bool IsForsaken(const char* name, int64_t version);
  // Whether this is true of any model.
  bool IsAnyForsaken();
  // Sets Triton's own option: a server that is not strict is ready whatever happens to its models.
  void SetStrict(bool strict) { is_strict_ = strict; }

 private:
  struct Instance {
    const void* model;
    std::string name;
    uint64_t version;
    IsServed is_served;
    bool ignores_parameters = false;
  };
  uint64_t VersionLocked(const std::string& name, int64_t version) const;
  bool IsForsakenLocked(const std::string& name, uint64_t version) const;

  std::mutex mutex_;
  std::unordered_map<const void*, Instance> instances_;
  bool is_strict_ = true;  // written before the server exists
};

}  // namespace pytriton::guard
