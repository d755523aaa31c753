#include "cost.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace pytriton {

namespace {

// The most requests among which the best cut is searched. The time for the search grows with their square.
constexpr size_t kMostTogether = 512;
// The cost of a batch by itself as a share of the limit: the value while nothing was measured, and the least one.
// Without a least value, an inexact measurement could give each length a batch of its own.
constexpr uint64_t kOverheadShare = 64;
constexpr uint64_t kLeastShare = 512;
// The weight of a batch relative to the one after it, how many batches a measurement needs, and how much their costs
// must differ.
constexpr double kFading = 0.98;
constexpr double kEnough = 8;
constexpr double kLeastVariation = 0.05;

uint64_t Times(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

uint64_t Plus(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

}  // namespace

CostCut::CostCut(const Settings& settings, std::vector<uint32_t> axes, uint64_t overhead)
    : limit_(settings.cost_limit),
      overhead_(overhead),
      packed_(settings.cost_packed),
      axes_(std::move(axes)),
      dimensions_(std::accumulate(axes_.begin(), axes_.end(), size_t{0})) {}

// The cost of a batch with one more request.
uint64_t CostCut::CostWith(Sum* sum, uint32_t rows, const std::vector<uint64_t>& sizes) const {
  sum->rows += rows;
  sum->longest.resize(dimensions_);
  sum->packed.resize(axes_.size());
  uint64_t most = 0;
  size_t at = 0;
  for (size_t input = 0; input < axes_.size(); ++input) {
    uint64_t own = 1;
    uint64_t padded = 1;
    for (uint32_t axis = 0; axis < axes_[input]; ++axis, ++at) {
      uint64_t& longest = sum->longest[at];
      const uint64_t size = sizes[at] == kAbsent ? 0 : std::max<uint64_t>(sizes[at], 1);
      longest = std::max(longest, size);
      own = Times(own, size);
      padded = Times(padded, longest);
    }
    sum->packed[input] = Plus(sum->packed[input], Times(own, rows));
    most = std::max(most, packed_ ? sum->packed[input] : Times(padded, sum->rows));
  }
  return most;
}

uint64_t CostCut::CostOf(uint32_t rows, const std::vector<uint64_t>& sizes) const {
  Sum sum;
  return CostWith(&sum, rows, sizes);
}

void CostCut::Add(uint32_t rows, std::vector<uint64_t> sizes) {
  const uint64_t cost = CostOf(1, sizes);
  requests_.push_back({rows, std::move(sizes), cost});
}

// In `order`, requests of similar length are neighbours, so each batch is a stretch of it. This finds the stretches
// whose costs, plus the cost of each batch by itself, have the least sum: more batches cost more by themselves, fewer
// have more padding.
void CostCut::CutSome(const uint32_t* order, size_t count, std::vector<Part>* batches) const {
  struct Best {
    uint64_t total = UINT64_MAX;  // the cost of all batches up to here
    uint64_t cost = 0;            // the cost of the last of them
    size_t from = 0;              // where the last one begins
  };
  std::vector<Best> best(count + 1);
  best[0].total = 0;
  Sum sum;
  for (size_t stop = 1; stop <= count; ++stop) {
    sum.rows = 0;
    sum.longest.assign(dimensions_, 0);
    sum.packed.assign(axes_.size(), 0);
    for (size_t start = stop; start-- > 0;) {
      const Request& request = requests_[order[start]];
      const uint64_t cost = CostWith(&sum, request.rows, request.sizes);
      if (start + 1 < stop && cost > limit_) break;
      const uint64_t total = Plus(best[start].total, Plus(cost, overhead_));
      if (total <= best[stop].total) best[stop] = {total, cost, start};
    }
  }
  for (size_t stop = count; stop > 0; stop = best[stop].from) {
    batches->push_back({{order + best[stop].from, order + stop}, best[stop].cost});
    std::sort(batches->back().places.begin(), batches->back().places.end());
  }
}

std::vector<CostCut::Part> CostCut::Cut() const {
  std::vector<uint32_t> order(requests_.size());
  std::iota(order.begin(), order.end(), 0);
  if (!packed_) {
    std::stable_sort(
        order.begin(), order.end(), [this](uint32_t a, uint32_t b) { return requests_[a].cost > requests_[b].cost; });
  }
  std::vector<Part> batches;
  for (size_t begin = 0; begin < order.size(); begin += kMostTogether) {
    CutSome(&order[begin], std::min(kMostTogether, order.size() - begin), &batches);
  }
  std::sort(batches.begin(), batches.end(), [](const Part& a, const Part& b) { return a.places < b.places; });
  return batches;
}

void CostPace::Took(uint64_t cost, uint64_t ns) {
  const auto x = static_cast<double>(cost);
  const auto y = static_cast<double>(ns);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (double* sum : {&count_, &costs_, &times_, &squares_, &products_}) *sum *= kFading;
  count_ += 1;
  costs_ += x;
  times_ += y;
  squares_ += x * x;
  products_ += x * y;
}

uint64_t CostPace::overhead(uint64_t limit) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const double x = costs_ / std::max(count_, 1.0);
  const double y = times_ / std::max(count_, 1.0);
  const double variance = squares_ / std::max(count_, 1.0) - x * x;
  if (count_ < kEnough || !(variance > kLeastVariation * x * x)) return std::max<uint64_t>(limit / kOverheadShare, 1);
  // Least squares: time = fixed + slope * cost.
  const double slope = (products_ / count_ - x * y) / variance;
  const double fixed = y - slope * x;
  // If the time does not grow with the cost, batches are cut only at the limit.
  if (!(slope > 0) || fixed >= slope * static_cast<double>(limit)) return limit;
  const auto found = static_cast<uint64_t>(std::max(fixed / slope, 0.0));
  return std::max<uint64_t>({found, limit / kLeastShare, 1});
}

}  // namespace pytriton
