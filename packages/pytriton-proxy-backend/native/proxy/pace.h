// How long a worker takes for its batches, as far as that tells when it is through with the next.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pytriton {

constexpr uint64_t kNever = UINT64_MAX;

class Pace {
 public:
  // Takes note of a full batch, and how long the worker was at it.
  void Took(uint64_t ns) {
    took_ns_[count_++ % kLast] = ns;
    const auto range = std::minmax_element(took_ns_, took_ns_ + kLast);
    // Nothing is to be gained where a batch takes no longer than its way here and back; and nobody can tell when a worker
    // is done that takes now this long, now that.
    is_steady_ = count_ >= kLast && *range.first >= kLeastNs && *range.second - *range.first <= *range.first / 2;
    shortest_ns_ = *range.first;
  }

  // How long after the begin of a full batch the worker is nearly done with it; kNever where nobody can tell.
  uint64_t nearly_done_ns() const {
    return is_steady_ ? shortest_ns_ - std::min(shortest_ns_ / 5, kMostEarlyNs) : kNever;
  }

 private:
  static constexpr uint64_t kLast = 4;
  static constexpr uint64_t kLeastNs = 1000 * 1000;
  // Triton rarely needs longer than this to bring the next batch.
  static constexpr uint64_t kMostEarlyNs = 1000 * 1000;

  uint64_t took_ns_[kLast] = {};
  uint64_t count_ = 0;
  uint64_t shortest_ns_ = 0;
  bool is_steady_ = false;
};

}  // namespace pytriton
