#include "memory.h"

namespace pytriton::guard {

bool MemoryBudget::TryReserve(uint64_t bytes, uint64_t limit) {
  const uint64_t before = bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (bytes <= limit && before <= limit - bytes) return true;
  Release(bytes);
  return false;
}

LargeRequests& large_requests() {
  static auto* const large = new LargeRequests;  // never freed: threads run until the end
  return *large;
}

}  // namespace pytriton::guard
