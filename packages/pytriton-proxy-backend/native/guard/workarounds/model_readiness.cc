#include "model_readiness.h"

#include <algorithm>

namespace pytriton::guard {

void ModelReadiness::Add(
    const void* instance, const void* model, const char* name, uint64_t version, IsServed is_served) {
  const std::lock_guard<std::mutex> lock(mutex_);
  instances_[instance] = {model, name, version, is_served, false};
}

void ModelReadiness::IgnoreParameters(const void* instance) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = instances_.find(instance); found != instances_.end()) found->second.ignores_parameters = true;
}

void ModelReadiness::Remove(const void* instance) {
  const std::lock_guard<std::mutex> lock(mutex_);
  instances_.erase(instance);
}

bool ModelReadiness::IsForsaken(const char* name, int64_t version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return IsForsakenLocked(name, VersionLocked(name, version));
}

bool ModelReadiness::HasParameters(const std::string& name, int64_t version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t asked = VersionLocked(name, version);
  bool is_known = false;
  for (const auto& [_, instance] : instances_) {
    if (instance.name != name || instance.version != asked) continue;
    is_known = true;
    if (!instance.ignores_parameters) return true;
  }
  return !is_known;
}

uint64_t ModelReadiness::VersionLocked(const std::string& name, int64_t version) const {
  uint64_t asked = version < 0 ? 0 : static_cast<uint64_t>(version);
  for (const auto& [_, instance] : instances_) {
    if (version < 0 && instance.name == name) asked = std::max(asked, instance.version);
  }
  return asked;
}

bool ModelReadiness::IsAnyForsaken() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_strict_ && std::any_of(instances_.begin(), instances_.end(), [this](const auto& entry) {
           return IsForsakenLocked(entry.second.name, entry.second.version);
         });
}

bool ModelReadiness::IsForsakenLocked(const std::string& name, uint64_t version) const {
  std::unordered_map<const void*, bool> whole;  // one entry for each time that the model is loaded
  for (const auto& [key, instance] : instances_) {
    if (instance.name != name || instance.version != version) continue;
    const auto at = whole.emplace(instance.model, true).first;
    if (at->second) at->second = instance.is_served(key);
  }
  return !whole.empty() && std::none_of(whole.begin(), whole.end(), [](const auto& model) { return model.second; });
}

}  // namespace pytriton::guard
