#include "http_callers.h"

namespace pytriton::guard {

void HttpCallers::OnSubmit(TRITONSERVER_InferenceRequest* request, int fd) {
  Shard& shard = ShardOf(request);
  const std::lock_guard<std::mutex> lock(shard.mutex);
  shard.entries[request] = {request, fd};
}

void HttpCallers::OnSubmitted(TRITONSERVER_InferenceRequest* request, int fd) { Mark(request, fd, &Entry::is_submitted); }

void HttpCallers::OnLeave(const TRITONSERVER_InferenceRequest* request, int fd) { Mark(request, fd, &Entry::has_left); }

void HttpCallers::OnDelete(const TRITONSERVER_InferenceRequest* request) {
  Shard& shard = ShardOf(request);
  const std::lock_guard<std::mutex> lock(shard.mutex);
  shard.entries.erase(request);
}

void HttpCallers::Mark(const TRITONSERVER_InferenceRequest* request, int fd, bool Entry::*mark) {
  if (request == nullptr) return;
  Shard& shard = ShardOf(request);
  const std::lock_guard<std::mutex> lock(shard.mutex);
  const auto found = shard.entries.find(request);
  // The request may be answered and gone, and another connection's request may have its address.
  if (found == shard.entries.end() || found->second.fd != fd) return;
  found->second.*mark = true;
  // This holds the lock, for which the deletion of the request waits.
  if (found->second.is_submitted && found->second.has_left) cancel_(found->second.request);
}

}  // namespace pytriton::guard
