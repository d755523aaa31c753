// Counts the work of the cache for one model in Triton's metrics, under the names that Triton has for its own cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "response_cache.h"

namespace pytriton {

// Returns null if the server has no custom metrics; other failures are logged.
std::unique_ptr<CacheCounter> NewCacheMetrics(const std::string& model, uint64_t version);

}  // namespace pytriton
