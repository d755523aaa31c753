#include "cache_metrics.h"

#include <utility>

#include "../triton/triton_util.h"

namespace pytriton {

namespace {

enum Family : uint32_t { kHits, kMisses, kHitDuration, kMissDuration, kFamilies };

struct Description {
  const char* name;
  const char* text;
};
// The metric families that the server has for its own cache. Triton returns the existing family if name and kind are
// the same.
constexpr Description kDescriptions[kFamilies] = {
    {"nv_cache_num_hits_per_model", "Number of cache hits per model"},
    {"nv_cache_num_misses_per_model", "Number of cache misses per model"},
    {"nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds"},
    {"nv_cache_miss_duration_per_model", "Total cache miss (insert+lookup) duration per model, in microseconds"},
};

// The families are made only once. While a server loads a model again, the old and the new one share their metrics,
// which is possible only within the same family.
struct Families {
  TRITONSERVER_MetricFamily* all[kFamilies] = {};
  std::string error;

  Families() {
    for (uint32_t i = 0; i < kFamilies && error.empty(); ++i) {
      error = TakeMessage(TRITONSERVER_MetricFamilyNew(
          &all[i], TRITONSERVER_METRIC_KIND_COUNTER, kDescriptions[i].name, kDescriptions[i].text));
    }
  }
};

class CacheMetrics : public CacheCounter {
 public:
  ~CacheMetrics() override {
    for (auto* metric : metrics_) {
      if (metric != nullptr) PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricDelete(metric), "deleting a metric");
    }
  }

  // Returns "" if the metrics were made, otherwise the reason why not.
  std::string Make(const Families& families, const std::string& model, uint64_t version) {
    const std::string number = std::to_string(version);
    TRITONSERVER_Parameter* labels[] = {
        TRITONSERVER_ParameterNew("model", TRITONSERVER_PARAMETER_STRING, model.c_str()),
        TRITONSERVER_ParameterNew("version", TRITONSERVER_PARAMETER_STRING, number.c_str())};
    std::string error;
    for (uint32_t i = 0; i < kFamilies && error.empty(); ++i) {
      error = TakeMessage(TRITONSERVER_MetricNew(
          &metrics_[i], families.all[i], const_cast<const TRITONSERVER_Parameter**>(labels), 2));
    }
    for (auto* label : labels) TRITONSERVER_ParameterDelete(label);
    return error;
  }

  void Hit(uint64_t ns) override {
    Add(kHits, 1);
    Add(kHitDuration, Microseconds(ns));
  }
  void Miss(uint64_t ns) override {
    Add(kMisses, 1);
    Add(kMissDuration, Microseconds(ns));
  }
  void Kept(uint64_t ns) override { Add(kMissDuration, Microseconds(ns)); }

 private:
  static double Microseconds(uint64_t ns) { return static_cast<double>(ns) / 1000; }

  void Add(Family family, double value) {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricIncrement(metrics_[family], value), "counting for the cache");
  }

  TRITONSERVER_Metric* metrics_[kFamilies] = {};
};

}  // namespace

std::unique_ptr<CacheCounter> NewCacheMetrics(const std::string& model, uint64_t version) {
  if (TRITONSERVER_MetricFamilyNew == nullptr || TRITONSERVER_MetricNew == nullptr ||
      TRITONSERVER_MetricDelete == nullptr || TRITONSERVER_MetricIncrement == nullptr) {
    return nullptr;
  }
  static const auto* const families = new Families();
  auto metrics = std::make_unique<CacheMetrics>();
  const std::string error = families->error.empty() ? metrics->Make(*families, model, version) : families->error;
  if (error.empty()) return metrics;
  PYTRITON_LOG(WARN, "model '" + model + "': its response cache has no metrics: " + error);
  return nullptr;
}

}  // namespace pytriton
