// The memory that requests take: sums over all that are being read or served, and the inputs of large requests.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace pytriton::guard {

// Smaller requests are not counted in the memory in flight: most requests are such, and many of them take little.
constexpr uint64_t kSmall = 64 * 1024;
// A JSON element has at least two characters, a digit and a comma, and as an element of a tensor at most eight bytes.
constexpr uint64_t kBytesPerJsonByte = 4;

// The memory of all requests that are being read or served.
class MemoryBudget {
 public:
  // Adds to the sum. Returns false, and adds nothing, if the sum would exceed the limit.
  bool TryReserve(uint64_t bytes, uint64_t limit);
  void Release(uint64_t bytes) { bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> bytes_{0};
};

// The input bytes of large requests, until each is deleted.
class LargeRequests {
 public:
  void Add(const void* request, uint64_t bytes) {
    Shard& shard = ShardOf(request);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    shard.bytes[request] += bytes;
    count_.fetch_add(1, std::memory_order_relaxed);
  }

  // Returns the bytes of a request, and forgets it.
  uint64_t Remove(const void* request) {
    // A request is added before anybody gets it who could delete it, so this cannot miss it.
    if (count_.load(std::memory_order_relaxed) == 0) return 0;
    Shard& shard = ShardOf(request);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.bytes.find(request);
    if (found == shard.bytes.end()) return 0;
    const uint64_t bytes = found->second;
    shard.bytes.erase(found);
    return bytes;
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<const void*, uint64_t> bytes;
  };
  Shard& ShardOf(const void* request) { return shards_[(reinterpret_cast<uintptr_t>(request) >> 6) % shards_.size()]; }

  std::array<Shard, 16> shards_;
  std::atomic<uint64_t> count_{0};  // how many were ever added
};

LargeRequests& large_requests();

}  // namespace pytriton::guard
