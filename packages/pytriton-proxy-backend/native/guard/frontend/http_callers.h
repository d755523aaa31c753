// Which request in Triton belongs to which HTTP connection, so that a request is cancelled when its caller leaves.
//
// The front end reads nothing from a connection while it serves the connection's request, so by itself it notices only
// when it writes the response that the caller has left.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <unordered_map>

struct TRITONSERVER_InferenceRequest;

namespace pytriton::guard {

class HttpCallers {
 public:
  // Cancels a request that Triton has and that is not deleted; it only sets a mark.
  using Cancel = void (*)(TRITONSERVER_InferenceRequest* request);
  explicit HttpCallers(Cancel cancel) : cancel_(cancel) {}

  // A request is about to be handed to Triton for a connection; then Triton has taken it.
  void OnSubmit(TRITONSERVER_InferenceRequest* request, int fd);
  void OnSubmitted(TRITONSERVER_InferenceRequest* request, int fd);
  // A request is about to be deleted, in any thread.
  void OnDelete(const TRITONSERVER_InferenceRequest* request);
  // The caller of a connection has left; `request` is its last request, or null.
  void OnLeave(const TRITONSERVER_InferenceRequest* request, int fd);

 private:
  struct Entry {
    TRITONSERVER_InferenceRequest* request;
    int fd;
    bool is_submitted = false;
    bool has_left = false;
  };
  struct Shard {
    std::mutex mutex;
    std::unordered_map<const TRITONSERVER_InferenceRequest*, Entry> entries;
  };
  Shard& ShardOf(const TRITONSERVER_InferenceRequest* request) {
    return shards_[(reinterpret_cast<uintptr_t>(request) >> 6) % shards_.size()];
  }
  // Notes an event of a request, and cancels the request once both events have happened.
  void Mark(const TRITONSERVER_InferenceRequest* request, int fd, bool Entry::*mark);

  const Cancel cancel_;
  std::array<Shard, 16> shards_;
};

}  // namespace pytriton::guard
