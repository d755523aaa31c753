#include "memory.h"

namespace pytriton::guard {

bool MemoryBudget::TryReserve(uint64_t bytes, uint64_t limit) {
  // What does not fit is never added, not for a moment: others would be refused for it.
  uint64_t before = bytes_.load(std::memory_order_relaxed);
  while (bytes <= limit && before <= limit - bytes) {
    if (bytes_.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed)) return true;
  }
  return false;
}

LargeRequests& large_requests() {
  static auto* const large = new LargeRequests;  // never freed: threads run until the end
  return *large;
}

}  // namespace pytriton::guard
