// What the batches of a model instance share, and the end of the instance.
#pragma once

#include <memory>
#include <mutex>

#include "../cache/response_cache.h"
#include "../triton/devices.h"
#include "input_ranks.h"

namespace pytriton {

// What the batches of a model instance need of it. It lives as long as the last of them, because a load of the model
// may end instances while workers still work on their batches.
struct InstanceState {
  InputRanks ranks;
  Devices devices;
  std::shared_ptr<ModelCache> cache;  // set if the cache belongs to the instance and not to its endpoint

  // When this returns, Triton's instance is gone, and nobody uses it in a call of Triton any more.
  void End() {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
  }
  // Calls `use` unless the instance has ended; it does not end before `use` returns.
  template <typename Use>
  void WhileThere(const Use& use) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!has_ended_) use();
  }

 private:
  std::mutex mutex_;
  bool has_ended_ = false;
};

}  // namespace pytriton
