// The metrics that one worker adds to the server's metrics page. The worker names them by numbers.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "../triton/triton_api.h"
#include "../wire/protocol.h"
#include "../wire/record.h"
#include "failure.h"

namespace pytriton {

// Used by one thread. `Clear` deletes what is left at the end.
class CallMetrics {
 public:
  // Carries out an operation between kMetricFamily and kMetricFamilyDelete.
  Failure Do(Operation operation, const CallBody& body, const std::string& name, const CallRecord& in, uint64_t* value);
  void Clear();

 private:
  struct Metric {
    TRITONSERVER_Metric* metric;
    uint64_t family;
  };

  Failure MakeFamily(int64_t kind, const std::string& name, const CallRecord& in, uint64_t* number);
  Failure MakeMetric(int64_t family, const CallRecord& in, uint64_t* number);
  Failure Use(Operation operation, const CallBody& body, uint64_t* value);
  void DeleteFamily(uint64_t number);

  std::map<uint64_t, TRITONSERVER_MetricFamily*> families_;
  std::map<uint64_t, Metric> metrics_;
  uint64_t next_number_ = 1;
};

}  // namespace pytriton
