// Which of the things that this library does were reached by what the server does. Each of them hangs on how the server
// calls other libraries; whoever starts it looks here, so that one that is not in force does not go unnoticed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shared.h"

namespace pytriton::guard {

// A byte for each: not 0 where it was reached. The starter's page takes the place of the first array.
inline std::atomic<uint8_t> g_unshared[static_cast<size_t>(Protection::kCount)];
inline std::atomic<std::atomic<uint8_t>*> g_reached{g_unshared};

inline void Reach(Protection protection) {
  auto& reached = g_reached.load(std::memory_order_relaxed)[static_cast<size_t>(protection)];
  // Read first: that is as good as free, however many threads do it.
  if (reached.load(std::memory_order_relaxed) == 0) reached.store(1, std::memory_order_relaxed);
}

}  // namespace pytriton::guard
