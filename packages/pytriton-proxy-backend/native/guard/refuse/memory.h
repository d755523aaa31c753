// The memory that requests take: sums over all that are being read or served, and the inputs of large requests.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace pytriton::guard {

// Requests below this are not counted in the memory in flight: many of them are little, and most requests are such.
constexpr uint64_t kSmall = 64 * 1024;
// A JSON element has at least two characters, a digit and a comma, and at most eight bytes as a tensor's element.
constexpr uint64_t kBytesPerJsonByte = 4;

// Memory that requests take, over all that are being read or served.
class MemoryBudget {
 public:
  // Adds to the sum. False, without adding, if that makes it larger than the limit.
  bool TryReserve(uint64_t bytes, uint64_t limit);
  void Release(uint64_t bytes) { bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> bytes_{0};
};

// The bytes of the inputs of large requests, by request, until it is deleted.
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
    // Added before the request was handed to anybody who could delete it.
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
  std::atomic<uint64_t> count_{0};  // of all that were ever added
};

LargeRequests& large_requests();

}  // namespace pytriton::guard
