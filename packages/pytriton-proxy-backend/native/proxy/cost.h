// How requests of different shapes are cut into batches that cost no more than they may. Knows numbers, not Triton.
//
// The cost of an input in a batch is the elements that its free dimensions take there: where it is padded, the rows of the
// batch times the longest size of each, and where it is packed, the sum over the rows. The cost of a batch is that of its
// costliest input, so that no array which a worker makes for one can be larger than the limit. A size of 0 counts as 1: what
// is empty has other sizes all the same, which others would be padded to.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "settings.h"

namespace pytriton {

class CostCut {
 public:
  // `axes` has the number of free dimensions of each input that has any; `overhead` is what a batch costs by itself.
  CostCut(const Settings& settings, std::vector<uint32_t> axes, uint64_t overhead);

  // Stands for the sizes of an input that a request lacks.
  static constexpr uint64_t kAbsent = UINT64_MAX;

  // The cost of a request by itself. `sizes` are those of the free dimensions of all inputs, one input after the other.
  uint64_t CostOf(uint32_t rows, const std::vector<uint64_t>& sizes) const;
  void Add(uint32_t rows, std::vector<uint64_t> sizes);

  struct Part {
    std::vector<uint32_t> places;  // of its requests, ascending
    uint64_t cost;
  };
  // Cuts what was added into batches. A request that costs more than the limit is alone in its batch. The batch with the
  // request that came first is the first.
  std::vector<Part> Cut() const;

 private:
  struct Request {
    uint32_t rows;
    std::vector<uint64_t> sizes;
    uint64_t cost;  // of one row by itself
  };
  // A batch that requests are added to.
  struct Sum {
    uint64_t rows = 0;
    std::vector<uint64_t> longest;  // by free dimension
    std::vector<uint64_t> packed;   // by input
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

// What a batch costs by itself, in the unit of its cost: found from how long workers take for cheap and for dear ones. The
// last hundred or so count. From any thread.
class CostPace {
 public:
  // Takes note of a batch, and how long a worker was at it.
  void Took(uint64_t cost, uint64_t ns);
  // Never more than the limit of a batch; what is a good guess where nothing is known.
  uint64_t overhead(uint64_t limit) const;

 private:
  mutable std::mutex mutex_;
  // Sums over the batches, each of which counts less from batch to batch.
  double count_ = 0, costs_ = 0, times_ = 0, squares_ = 0, products_ = 0;
};

}  // namespace pytriton
