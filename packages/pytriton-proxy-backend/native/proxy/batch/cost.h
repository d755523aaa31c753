// Cuts requests of different shapes into batches that cost no more than a limit. Knows numbers, not Triton.
//
// The cost of an input in a batch is the number of elements in its free dimensions: if the input is padded, the rows of
// the batch times the longest size of each dimension; if it is packed, the sum over the rows. The cost of a batch is
// that of its costliest input, so no array that a worker makes for an input is larger than the limit. A size of 0
// counts as 1, because an empty input has other dimensions, to which the other requests would be padded.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "../wire/settings.h"

namespace pytriton {

class CostCut {
 public:
  // `axes` is the number of free dimensions of each input that has some; `overhead` is the cost of a batch by itself.
  CostCut(const Settings& settings, std::vector<uint32_t> axes, uint64_t overhead);

  // The size that stands for an input that a request does not have.
  static constexpr uint64_t kAbsent = UINT64_MAX;

  // The cost of a request by itself. `sizes` are the free dimensions of all inputs, one input after the other.
  uint64_t CostOf(uint32_t rows, const std::vector<uint64_t>& sizes) const;
  void Add(uint32_t rows, std::vector<uint64_t> sizes);

  struct Part {
    std::vector<uint32_t> places;  // the numbers of its requests, ascending
    uint64_t cost;
  };
  // Cuts the added requests into batches. A request that costs more than the limit gets a batch of its own. The first
  // batch is the one with the request that came first.
  std::vector<Part> Cut() const;

 private:
  struct Request {
    uint32_t rows;
    std::vector<uint64_t> sizes;
    uint64_t cost;  // the cost of one row by itself
  };
  // A batch to which requests are added.
  struct Sum {
    uint64_t rows = 0;
    std::vector<uint64_t> longest;  // one for each free dimension
    std::vector<uint64_t> packed;   // one for each input
  };

  uint64_t CostWith(Sum* sum, uint32_t rows, const std::vector<uint64_t>& sizes) const;
  void CutSome(const uint32_t* order, size_t count, std::vector<Part>* batches) const;

  const uint64_t limit_;
  const uint64_t overhead_;
  const bool packed_;
  const std::vector<uint32_t> axes_;
  size_t dimensions_ = 0;
  std::vector<Request> requests_;
};

// What a batch costs by itself, in units of cost, measured from how long workers take for cheap and for costly batches.
// About the last hundred batches count. Any thread may use it.
class CostPace {
 public:
  // Notes a batch and how long a worker took for it.
  void Took(uint64_t cost, uint64_t ns);
  // The measured value, at most `limit`; a guess as long as nothing was measured.
  uint64_t overhead(uint64_t limit) const;

 private:
  mutable std::mutex mutex_;
  // Sums over the batches, in which older batches have less weight.
  double count_ = 0, costs_ = 0, times_ = 0, squares_ = 0, products_ = 0;
};

}  // namespace pytriton
