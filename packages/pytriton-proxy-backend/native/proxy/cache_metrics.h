// What the cache has done for one model, in Triton's metrics, under the names that Triton has for its own cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "response_cache.h"

namespace pytriton {

// Null where the server has no metrics of others; the log says what else is wrong.
std::unique_ptr<CacheCounter> NewCacheMetrics(const std::string& model, uint64_t version);

}  // namespace pytriton
