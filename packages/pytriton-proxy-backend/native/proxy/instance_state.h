// What the batches of a model instance have in common, and when the instance ends.
#pragma once

#include <memory>
#include <mutex>

#include "devices.h"
#include "input_ranks.h"
#include "response_cache.h"

namespace pytriton {

// What the batches of a model instance use of it. It lives as long as the last of them: where a load of the model takes
// instances away, Triton ends these while workers are still at their batches.
struct InstanceState {
  InputRanks ranks;
  Devices devices;
  std::shared_ptr<ModelCache> cache;  // where the instance has it, and not its endpoint

  // Triton's instance is gone when this returns, and nobody calls Triton with it from now on.
  void End() {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
  }
  // Calls `use` unless the instance has ended, which it does not meanwhile.
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
