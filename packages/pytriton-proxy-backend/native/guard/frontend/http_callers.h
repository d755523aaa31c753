// Which request in Triton belongs to which HTTP connection, so that it is cancelled when its caller leaves.
//
// The front end asks for nothing from a connection while its request is served, and would notice that the caller has left
// when it writes the response.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <unordered_map>

struct TRITONSERVER_InferenceRequest;

namespace pytriton::guard {

class HttpCallers {
 public:
  // What cancels a request, which Triton has and which is not deleted; it only sets a mark.
  using Cancel = void (*)(TRITONSERVER_InferenceRequest* request);
  explicit HttpCallers(Cancel cancel) : cancel_(cancel) {}

  // A request is about to be handed to Triton for a connection, and Triton has taken it.
  void OnSubmit(TRITONSERVER_InferenceRequest* request, int fd);
  void OnSubmitted(TRITONSERVER_InferenceRequest* request, int fd);
  // A request is about to be deleted, in whatever thread.
  void OnDelete(const TRITONSERVER_InferenceRequest* request);
  // The caller of a connection has left, whose last request this was, or null.
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
  // Marks what has come to pass with a request, and cancels it where both have.
  void Mark(const TRITONSERVER_InferenceRequest* request, int fd, bool Entry::*mark);

  const Cancel cancel_;
  std::array<Shard, 16> shards_;
};

}  // namespace pytriton::guard
