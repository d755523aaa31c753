// How requests of different shapes are cut into batches that cost no more than they may. Knows numbers, not Triton.
//
// The cost of an input in a batch is the elements that its free dimensions take there: where it is padded, the rows of the
// batch times the longest size of each, and where it is packed, the sum over the rows. The cost of a batch is that of its
// costliest input, so that no array which a worker makes for one can be larger than the limit.
#pragma once

#include <cstdint>
#include <vector>

#include "settings.h"

namespace pytriton {

class CostCut {
 public:
  // `axes` has the number of free dimensions of each input that has any.
  CostCut(const Settings& settings, std::vector<uint32_t> axes);

  // Of a request by itself. `sizes` are those of the free dimensions of all inputs, one input after the other; those of an
  // input that the request lacks are 0.
  uint64_t CostOf(uint32_t rows, const std::vector<uint64_t>& sizes) const;
  void Add(uint32_t rows, std::vector<uint64_t> sizes);

  // Cuts what was added into batches: the places of the requests of each, ascending. A request that costs more than the
  // limit is alone in its batch. The batch with the request that came first is the first.
  std::vector<std::vector<uint32_t>> Cut() const;

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
  void CutPart(const std::vector<uint32_t>& order, size_t begin, size_t end,
               std::vector<std::vector<uint32_t>>* batches) const;

  const uint64_t limit_;
  const uint64_t overhead_;
  const bool packed_;
  const std::vector<uint32_t> axes_;
  size_t dimensions_ = 0;
  std::vector<Request> requests_;
};

}  // namespace pytriton
