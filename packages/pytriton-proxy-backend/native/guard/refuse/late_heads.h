// The heads of requests for which a thread of the front end waits, and their deadlines. No I/O and no clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <unordered_set>
#include <utility>

namespace pytriton::guard {

class LateHeads {
 public:
  bool empty() const { return heads_.empty(); }

  // Waits for the head of a connection until a deadline; an earlier deadline of the connection stays.
  void Add(int fd, uint64_t until_ms) {
    if (listed_.insert(fd).second) heads_.emplace(until_ms, fd);
  }

  // The timeout for epoll_wait: `timeout_ms`, or less if a head is late before. A few milliseconds more do no harm.
  int Timeout(int timeout_ms, uint64_t now_ms) const {
    if (heads_.empty()) return timeout_ms;
    const uint64_t until = heads_.begin()->first;
    constexpr uint64_t kMost = 60'000;
    const int left = static_cast<int>(std::min(until > now_ms ? until - now_ms + 1 : 0, kMost));
    return timeout_ms < 0 ? left : std::min(timeout_ms, left);
  }

  // Calls `end(fd)` for each head that is late. It returns a new deadline, or 0.
  template <typename End>
  void EndLate(uint64_t now_ms, const End& end) {
    while (!heads_.empty() && heads_.begin()->first <= now_ms) {
      const int fd = heads_.begin()->second;
      heads_.erase(heads_.begin());
      listed_.erase(fd);
      const uint64_t until = end(fd);
      if (until > now_ms) Add(fd, until);
    }
  }

 private:
  std::set<std::pair<uint64_t, int>> heads_;  // by their deadlines
  std::unordered_set<int> listed_;
};

}  // namespace pytriton::guard
