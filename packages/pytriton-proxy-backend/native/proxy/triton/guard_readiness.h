// Tells the guard, if the process has one, which instances have a worker, because tritonserver itself asks no backend.
#pragma once

#include <dlfcn.h>

#include <cstdint>

namespace pytriton {

using IsServed = bool (*)(const void* instance);

inline void TellGuard(const void* instance, const void* model, const char* name, uint64_t version, IsServed is_served) {
  using Add = void (*)(const void*, const void*, const char*, uint64_t, IsServed);
  const auto add = reinterpret_cast<Add>(dlsym(RTLD_DEFAULT, "pytriton_guard_add_instance"));
  if (add != nullptr) add(instance, model, name, version, is_served);
}

// Says that nobody who serves the instance reads the parameters of requests, so a name in a request that is no input is
// a mistake.
inline void TellGuardOfNames(const void* instance) {
  using Ignore = void (*)(const void*);
  const auto ignore = reinterpret_cast<Ignore>(dlsym(RTLD_DEFAULT, "pytriton_guard_ignore_parameters"));
  if (ignore != nullptr) ignore(instance);
}

// When this returns, the guard does not ask for the instance any more.
inline void ForgetInGuard(const void* instance) {
  using Remove = void (*)(const void*);
  const auto remove = reinterpret_cast<Remove>(dlsym(RTLD_DEFAULT, "pytriton_guard_remove_instance"));
  if (remove != nullptr) remove(instance);
}

}  // namespace pytriton
