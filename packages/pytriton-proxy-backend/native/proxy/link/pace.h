// Predicts from past batches when a worker will be done with the one that it has.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pytriton {

constexpr uint64_t kNever = UINT64_MAX;

class Pace {
 public:
  // Notes how long the worker took for a batch, and how long that was expected to take: 1 ns if all are alike.
  void Took(uint64_t ns, double expected_ns) {
    if (!(expected_ns > 0)) return;
    ratios_[count_++ % kLast] = static_cast<double>(ns) / expected_ns;
    const auto range = std::minmax_element(ratios_, ratios_ + kLast);
    // If the times vary much, nobody can predict when the worker will be done.
    is_steady_ = count_ >= kLast && *range.second <= *range.first * 1.5;
    least_ = *range.first;
  }

  // How long after the start of a batch the worker is nearly done with it; kNever if that cannot be predicted.
  uint64_t nearly_done_ns(double expected_ns) const {
    const auto shortest_ns = static_cast<uint64_t>(std::max(least_ * expected_ns, 0.0));
    // Sending ahead gains nothing if a batch takes no longer than its transport.
    return is_steady_ && shortest_ns >= kLeastNs ? shortest_ns - std::min(shortest_ns / 5, kMostEarlyNs) : kNever;
  }

 private:
  static constexpr uint64_t kLast = 4;
  static constexpr uint64_t kLeastNs = 1000 * 1000;
  // Triton rarely needs longer than this to bring the next batch.
  static constexpr uint64_t kMostEarlyNs = 1000 * 1000;

  double ratios_[kLast] = {};
  uint64_t count_ = 0;
  double least_ = 0;
  bool is_steady_ = false;
};

}  // namespace pytriton
