// Which parts of this library the server has reached. Each part depends on how the server calls other libraries; the
// starter of the server checks these marks, so that a part that is not in force is noticed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shared.h"

namespace pytriton::guard {

// A byte for each part, not 0 once it was reached. The page of the starter replaces the first array.
inline std::atomic<uint8_t> g_unshared[static_cast<size_t>(Protection::kCount)];
inline std::atomic<std::atomic<uint8_t>*> g_reached{g_unshared};

inline void Reach(Protection protection) {
  auto& reached = g_reached.load(std::memory_order_relaxed)[static_cast<size_t>(protection)];
  // It is read first, which costs nearly nothing, however many threads do it.
  if (reached.load(std::memory_order_relaxed) == 0) reached.store(1, std::memory_order_relaxed);
}

}  // namespace pytriton::guard
