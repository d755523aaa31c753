// A double of Triton, which checks nothing: requests with inputs of any form, and what became of each of them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../proxy/triton/triton_api.h"
#include "check.h"
#include "triton_errors.h"

struct Place {
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t device = 0;
  void* address = nullptr;
};

struct TRITONBACKEND_Input {
  std::string name;
  uint32_t dtype;
  std::vector<int64_t> dims;
  uint64_t byte_size;
  std::vector<std::string> buffers;
  bool on_gpu = false;
  // Where a program has devices: of each buffer, its kind of memory, device and address.
  std::vector<Place> places = {};
};

struct TRITONBACKEND_Request {
  std::string id;
  std::vector<TRITONBACKEND_Input> inputs;
  bool has_odd_parameter = false;
  // What became of it.
  int released = 0, answers = 0;
  std::string error;
  TRITONSERVER_Error_Code code = TRITONSERVER_ERROR_UNKNOWN;
  std::vector<std::string> outputs;
  // What the batch should make of it.
  bool is_good = true;
  bool is_costly = false;
};

struct TRITONBACKEND_Output {
  std::string payload;
  Place place;
};

struct TRITONBACKEND_Response {
  TRITONBACKEND_Request* request;
  std::vector<std::unique_ptr<TRITONBACKEND_Output>> outputs;
};

inline std::function<void()> while_output_is_copied;
// Where outputs are wanted, and how to read what lies there; on the host where a program does not say.
inline std::function<Place(uint64_t size)> output_place;
inline std::function<std::string(const Place& place, uint64_t size)> take_output;
// Whether there is no memory for an output of so many bytes, as Triton's ensembles tell it: by no address, and no error.
inline std::function<bool(uint64_t size)> lacks_memory;
inline int reports = 0;  // of statistics
inline bool may_log = false;

extern "C" {

bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel) { return !may_log; }
TRITONSERVER_Error* TRITONSERVER_LogMessage(TRITONSERVER_LogLevel, const char*, int, const char* text) {
  std::fprintf(stderr, "%s\n", text);
  std::exit(1);
}

TRITONSERVER_Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request* request, const char** id) {
  *id = request->id.c_str();
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestCorrelationId(TRITONBACKEND_Request*, uint64_t*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_RequestCorrelationIdString(TRITONBACKEND_Request*, const char**) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_RequestFlags(TRITONBACKEND_Request*, uint32_t*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request*, uint64_t*) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request*, TRITONSERVER_InferenceTrace**) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request*, bool*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = request->has_odd_parameter ? 2 : 1;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestParameter(
    TRITONBACKEND_Request* request, const uint32_t index, const char** key, TRITONSERVER_ParameterType* type,
    const void** value) {
  *key = index == 0 ? "id" : "odd";
  *type = index == 0 ? TRITONSERVER_PARAMETER_STRING : static_cast<TRITONSERVER_ParameterType>(9);
  *value = request->id.c_str();
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = static_cast<uint32_t>(request->inputs.size());
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(
    TRITONBACKEND_Request* request, const uint32_t index, TRITONBACKEND_Input** input) {
  *input = &request->inputs[index];
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request*, uint32_t* count) {
  *count = 1;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(
    TRITONBACKEND_Request* request, const uint32_t, const char** name) {
  // Not the same for all.
  *name = request->id.size() % 2 == 0 ? "y" : request->id.c_str();
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* request, uint32_t) {
  ++request->released;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input* input, const char** name, TRITONSERVER_DataType* dtype, const int64_t** shape,
    uint32_t* dims_count, uint64_t* byte_size, uint32_t* buffer_count) {
  *name = input->name.c_str();
  *dtype = static_cast<TRITONSERVER_DataType>(input->dtype);
  *shape = input->dims.data();
  *dims_count = static_cast<uint32_t>(input->dims.size());
  *byte_size = input->byte_size;
  *buffer_count = static_cast<uint32_t>(input->buffers.size());
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input* input, const uint32_t index, const void** buffer, uint64_t* size,
    TRITONSERVER_MemoryType* memory_type, int64_t* memory_id) {
  *buffer = input->buffers[index].data();
  *size = input->buffers[index].size();
  *memory_type = input->on_gpu ? TRITONSERVER_MEMORY_GPU : TRITONSERVER_MEMORY_CPU;
  *memory_id = 0;
  if (index < input->places.size()) {
    const Place& place = input->places[index];
    *memory_type = place.memory;
    *memory_id = place.device;
    if (place.address != nullptr) *buffer = place.address;
  }
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory** factory, TRITONBACKEND_Request* request) {
  *factory = reinterpret_cast<TRITONBACKEND_ResponseFactory*>(request);
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory* factory, const uint32_t) {
  ++reinterpret_cast<TRITONBACKEND_Request*>(factory)->answers;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory*, bool*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response** response, TRITONBACKEND_Request* request) {
  CHECK(request->released == 0);
  *response = new TRITONBACKEND_Response{request, {}};
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseNewFromFactory(
    TRITONBACKEND_Response** response, TRITONBACKEND_ResponseFactory* factory) {
  return TRITONBACKEND_ResponseNew(response, reinterpret_cast<TRITONBACKEND_Request*>(factory));
}
TRITONSERVER_Error* TRITONBACKEND_ResponseSetStringParameter(TRITONBACKEND_Response*, const char*, const char*) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseSetIntParameter(TRITONBACKEND_Response*, const char*, const int64_t) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseSetBoolParameter(TRITONBACKEND_Response*, const char*, const bool) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseSetDoubleParameter(TRITONBACKEND_Response*, const char*, const double) {
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response* response, TRITONBACKEND_Output** output, const char*, const TRITONSERVER_DataType,
    const int64_t*, const uint32_t) {
  response->outputs.push_back(std::make_unique<TRITONBACKEND_Output>());
  *output = response->outputs.back().get();
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output* output, void** buffer, const uint64_t size, TRITONSERVER_MemoryType* memory_type,
    int64_t* memory_id) {
  // Between the look at the strings and their copy.
  if (while_output_is_copied) while_output_is_copied();
  output->payload.resize(size);
  *buffer = &output->payload[0];
  if (output_place) output->place = output_place(size);
  if (output->place.address != nullptr) *buffer = output->place.address;
  if (lacks_memory && lacks_memory(size)) *buffer = nullptr;
  *memory_type = output->place.memory;
  *memory_id = output->place.device;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(
    TRITONBACKEND_Response* response, const uint32_t, TRITONSERVER_Error* error) {
  TRITONBACKEND_Request* request = response->request;
  ++request->answers;
  for (const auto& output : response->outputs) {
    if (output->place.address != nullptr) output->payload = take_output(output->place, output->payload.size());
  }
  if (error != nullptr) {
    request->error = error->text;
    request->code = error->code;
  } else {
    for (const auto& output : response->outputs) request->outputs.push_back(output->payload);
  }
  delete response;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request* request, const bool, const uint64_t, const uint64_t,
    const uint64_t, const uint64_t) {
  CHECK(request->released == 0);
  ++reports;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance*, const uint64_t, const uint64_t, const uint64_t, const uint64_t, const uint64_t) {
  ++reports;
  return nullptr;
}

}  // extern "C"
