#include "hooks.h"

#include <dlfcn.h>

#include <atomic>

namespace pytriton::guard {

namespace {

constexpr auto kCount = static_cast<size_t>(Hook::kCount);

constexpr const char* kNames[] = {
#define PYTRITON_NAME(name) #name,
    PYTRITON_HOOKS(PYTRITON_NAME)
#undef PYTRITON_NAME
};

// Zero before any code runs, because the constructors of other libraries call such functions.
std::atomic<void*> g_next[kCount];

}  // namespace

void* FindNext(Hook hook) {
  const auto index = static_cast<size_t>(hook);
  void* found = g_next[index].load(std::memory_order_relaxed);
  if (found == nullptr) {
    found = dlsym(RTLD_NEXT, kNames[index]);
    g_next[index].store(found, std::memory_order_relaxed);
  }
  return found;
}

void FindAllNext() {
  for (size_t i = 0; i < kCount; ++i) FindNext(static_cast<Hook>(i));
}

}  // namespace pytriton::guard
