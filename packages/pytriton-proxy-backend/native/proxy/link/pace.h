// Predicts from past batches when a worker will be done with the one that it has.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pytriton {

constexpr uint64_t kNever = UINT64_MAX;

class Pace {
 public:
  // Notes a full batch and how long the worker took for it.
  void Took(uint64_t ns) {
    took_ns_[count_++ % kLast] = ns;
    const auto range = std::minmax_element(took_ns_, took_ns_ + kLast);
    // Sending ahead gains nothing if a batch takes no longer than its transport; and if the times vary much, nobody can
    // predict when the worker will be done.
    is_steady_ = count_ >= kLast && *range.first >= kLeastNs && *range.second - *range.first <= *range.first / 2;
    shortest_ns_ = *range.first;
  }

  // How long after the start of a full batch the worker is nearly done with it; kNever if that cannot be predicted.
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
