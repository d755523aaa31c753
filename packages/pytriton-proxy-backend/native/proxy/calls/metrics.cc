#include "metrics.h"

#include <cstring>
#include <vector>

namespace pytriton {

namespace {

uint64_t AsBits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

Failure NewHistogram(TRITONSERVER_MetricFamily* family, const RecordTensor& tensor, Parameters* labels,
                     TRITONSERVER_Metric** metric) {
  if (TRITONSERVER_MetricNewWithArgs == nullptr || TRITONSERVER_MetricArgsSetHistogram == nullptr) {
    return Lacking("histograms");
  }
  if (tensor.dtype != kFp64Type) return {TRITONSERVER_ERROR_INVALID_ARG, "the buckets of a histogram are FP64"};
  // The bounds are copied because Triton reads them several times, and the worker could change them meanwhile.
  std::vector<double> buckets(tensor.payload_length / sizeof(double));
  if (!buckets.empty()) std::memcpy(buckets.data(), tensor.payload, tensor.payload_length);
  TRITONSERVER_MetricArgs* args = nullptr;
  PYTRITON_FAIL_IF(TRITONSERVER_MetricArgsNew(&args));
  Failure failure = Take(TRITONSERVER_MetricArgsSetHistogram(args, buckets.data(), buckets.size()));
  if (!failure) {
    failure = Take(TRITONSERVER_MetricNewWithArgs(metric, family, labels->data(), labels->size(), args));
  }
  PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricArgsDelete(args), "deleting the arguments of a metric");
  return failure;
}

}  // namespace

Failure CallMetrics::Do(
    Operation operation, const CallBody& body, const std::string& name, const CallRecord& in, uint64_t* value) {
  if (TRITONSERVER_MetricFamilyNew == nullptr) return Lacking("metrics of models");
  const auto number = static_cast<uint64_t>(body.subject);
  switch (operation) {
    case Operation::kMetricFamily:
      return MakeFamily(body.subject, name, in, value);
    case Operation::kMetric:
      return MakeMetric(body.subject, in, value);
    case Operation::kMetricFamilyDelete:
      if (families_.count(number) == 0) return {TRITONSERVER_ERROR_INVALID_ARG, "there is no such metric family"};
      DeleteFamily(number);
      return {};
    default:
      return Use(operation, body, value);
  }
}

void CallMetrics::Clear() {
  for (auto& [number, metric] : metrics_) {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricDelete(metric.metric), "deleting a metric");
  }
  metrics_.clear();
  for (auto& [number, family] : families_) {
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricFamilyDelete(family), "deleting a metric family");
  }
  families_.clear();
}

Failure CallMetrics::MakeFamily(int64_t kind, const std::string& name, const CallRecord& in, uint64_t* number) {
  if (kind < TRITONSERVER_METRIC_KIND_COUNTER || kind > TRITONSERVER_METRIC_KIND_HISTOGRAM) {
    return {TRITONSERVER_ERROR_INVALID_ARG, "Unknown metric kind"};
  }
  const auto parameters = in.Parameters();
  TRITONSERVER_MetricFamily* family = nullptr;
  PYTRITON_FAIL_IF(TRITONSERVER_MetricFamilyNew(
      &family, static_cast<TRITONSERVER_MetricKind>(kind), name.c_str(), parameters.empty() ? "" : parameters[0].text));
  *number = next_number_++;
  families_[*number] = family;
  return {};
}

Failure CallMetrics::MakeMetric(int64_t family, const CallRecord& in, uint64_t* number) {
  const auto found = families_.find(static_cast<uint64_t>(family));
  if (found == families_.end()) return {TRITONSERVER_ERROR_INVALID_ARG, "there is no such metric family"};
  Parameters labels;
  for (const auto& label : in.Parameters()) {
    if (label.type != TRITONSERVER_PARAMETER_STRING) {
      return {TRITONSERVER_ERROR_INVALID_ARG, std::string("label '") + label.key + "' of a metric is no text"};
    }
    labels.Add(TRITONSERVER_ParameterNew(label.key, TRITONSERVER_PARAMETER_STRING, label.text));
  }
  TRITONSERVER_Metric* metric = nullptr;
  if (in.tensors().empty()) {
    PYTRITON_FAIL_IF(TRITONSERVER_MetricNew(&metric, found->second, labels.data(), labels.size()));
  } else {
    const Failure failure = NewHistogram(found->second, in.tensors()[0], &labels, &metric);
    if (failure) return failure;
  }
  *number = next_number_++;
  metrics_[*number] = {metric, found->first};
  return {};
}

Failure CallMetrics::Use(Operation operation, const CallBody& body, uint64_t* value) {
  const auto found = metrics_.find(static_cast<uint64_t>(body.subject));
  if (found == metrics_.end()) return {TRITONSERVER_ERROR_INVALID_ARG, "there is no such metric"};
  TRITONSERVER_Metric* metric = found->second.metric;
  switch (operation) {
    case Operation::kMetricIncrement:
      return Take(TRITONSERVER_MetricIncrement(metric, body.value));
    case Operation::kMetricSet:
      return Take(TRITONSERVER_MetricSet(metric, body.value));
    case Operation::kMetricObserve:
      return TRITONSERVER_MetricObserve == nullptr ? Lacking("histograms")
                                                   : Take(TRITONSERVER_MetricObserve(metric, body.value));
    case Operation::kMetricValue: {
      double read = 0;
      const Failure failure = Take(TRITONSERVER_MetricValue(metric, &read));
      *value = AsBits(read);
      return failure;
    }
    default:
      metrics_.erase(found);
      return Take(TRITONSERVER_MetricDelete(metric));
  }
}

// The metrics of the family go first, because Triton does not delete a family that has some.
void CallMetrics::DeleteFamily(uint64_t number) {
  for (auto it = metrics_.begin(); it != metrics_.end();) {
    if (it->second.family != number) {
      ++it;
      continue;
    }
    PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricDelete(it->second.metric), "deleting a metric");
    it = metrics_.erase(it);
  }
  const auto family = families_.find(number);
  PYTRITON_LOG_IF_ERROR(TRITONSERVER_MetricFamilyDelete(family->second), "deleting a metric family");
  families_.erase(family);
}

}  // namespace pytriton
