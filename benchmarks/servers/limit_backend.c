// The limit: what tritonserver itself can do, without anyone's proxy and without Python.
//
// A backend that computes the models of benchmarks/servers/models.py where the server calls it: the sum of two inputs of
// FP32, or the one input as it is; after a sleep where the model asks for one; once, or several times for a stream. It
// reports statistics, as every backend has to, and nothing else.
//
// The part of Triton's backend API that it calls is declared here, so that building it needs no header of Triton's.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONSERVER_Message TRITONSERVER_Message;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
typedef struct TRITONBACKEND_Response TRITONBACKEND_Response;
typedef struct TRITONBACKEND_ResponseFactory TRITONBACKEND_ResponseFactory;
typedef struct TRITONBACKEND_Input TRITONBACKEND_Input;
typedef struct TRITONBACKEND_Output TRITONBACKEND_Output;

enum { TYPE_FP32 = 11, MEMORY_CPU = 0, ERROR_INTERNAL = 1, RELEASE_ALL = 1, COMPLETE_FINAL = 1 };

TRITONSERVER_Error* TRITONSERVER_ErrorNew(int code, const char* message);
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message*, const char** base, size_t* size);
TRITONSERVER_Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message*);
TRITONSERVER_Error* TRITONBACKEND_ModelConfig(TRITONBACKEND_Model*, uint32_t version, TRITONSERVER_Message**);
TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model*, void* state);
TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model*, void** state);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Model**);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*, _Bool success, uint64_t exec_start, uint64_t compute_start,
    uint64_t compute_end, uint64_t exec_end);
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance*, uint64_t batch_size, uint64_t exec_start, uint64_t compute_start,
    uint64_t compute_end, uint64_t exec_end);
TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request*, uint32_t* count);
TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request*, uint32_t index, TRITONBACKEND_Input**);
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request*, uint32_t flags);
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input*, const char** name, int* datatype, const int64_t** shape, uint32_t* dims, uint64_t* size,
    uint32_t* buffers);
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input*, uint32_t index, const void** buffer, uint64_t* size, int* memory_type, int64_t* memory_id);
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory**, TRITONBACKEND_Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory*);
TRITONSERVER_Error* TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response**, TRITONBACKEND_ResponseFactory*);
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response**, TRITONBACKEND_Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response*, TRITONBACKEND_Output**, const char* name, int datatype, const int64_t* shape,
    uint32_t dims);
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response*, uint32_t flags, TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output*, void** buffer, uint64_t size, int* memory_type, int64_t* memory_id);

#define RETURN_IF_ERROR(call)                 \
  do {                                        \
    TRITONSERVER_Error* failed = (call);      \
    if (failed != NULL) return failed;        \
  } while (0)

typedef struct {
  long batch_us, row_us, responses;
} Settings;

static uint64_t now_ns(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// The configuration is JSON that the server wrote. The settings of the model are in it as a text, itself of JSON.
static long parameter(const char* json, size_t size, const char* name)
{
  const char* end = json + size;
  const char* found = memmem(json, size, name, strlen(name));
  while (found != NULL && found < end && (*found < '0' || *found > '9')) ++found;
  return found == NULL || found == end ? 0 : strtol(found, NULL, 10);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model)
{
  TRITONSERVER_Message* message;
  const char* json;
  size_t size;
  RETURN_IF_ERROR(TRITONBACKEND_ModelConfig(model, 1, &message));
  RETURN_IF_ERROR(TRITONSERVER_MessageSerializeToJson(message, &json, &size));
  Settings* settings = malloc(sizeof *settings);
  if (settings == NULL) return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "out of memory");
  settings->batch_us = parameter(json, size, "batch_us");
  settings->row_us = parameter(json, size, "row_us");
  settings->responses = parameter(json, size, "responses");
  RETURN_IF_ERROR(TRITONSERVER_MessageDelete(message));
  return TRITONBACKEND_ModelSetState(model, settings);
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model)
{
  void* settings;
  RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &settings));
  free(settings);
  return NULL;
}

typedef struct {
  int datatype;
  const int64_t* shape;
  uint32_t dims, buffers;
  uint64_t size;
  TRITONBACKEND_Input* input;
} Tensor;

static TRITONSERVER_Error* tensor_of(TRITONBACKEND_Request* request, uint32_t index, Tensor* tensor)
{
  RETURN_IF_ERROR(TRITONBACKEND_RequestInputByIndex(request, index, &tensor->input));
  return TRITONBACKEND_InputProperties(
      tensor->input, NULL, &tensor->datatype, &tensor->shape, &tensor->dims, &tensor->size, &tensor->buffers);
}

// One pass over each input: the first is copied to the output, the second added to what is there.
static TRITONSERVER_Error* compute(TRITONBACKEND_Request* request, const Tensor* first, uint32_t inputs, char* output)
{
  for (uint32_t index = 0; index < inputs; ++index) {
    Tensor tensor;
    RETURN_IF_ERROR(tensor_of(request, index, &tensor));
    if (tensor.size != first->size || (index > 0 && tensor.datatype != TYPE_FP32))
      return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "expected one input, or inputs of FP32 with the same shape");
    char* at = output;
    for (uint32_t part = 0; part < tensor.buffers; ++part) {
      const void* buffer;
      uint64_t size;
      int memory = MEMORY_CPU;
      int64_t id = 0;
      RETURN_IF_ERROR(TRITONBACKEND_InputBuffer(tensor.input, part, &buffer, &size, &memory, &id));
      if (memory > 1) return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "expected an input in the memory of the host");
      if (index == 0) {
        memcpy(at, buffer, size);
      } else {
        if (size % sizeof(float) != 0)
          return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "expected whole floats in each buffer");
        for (uint64_t offset = 0; offset < size; offset += sizeof(float)) {
          float sum, value;  // neither side has to be aligned
          memcpy(&sum, at + offset, sizeof sum);
          memcpy(&value, (const char*)buffer + offset, sizeof value);
          sum += value;
          memcpy(at + offset, &sum, sizeof sum);
        }
      }
      at += size;
    }
  }
  return NULL;
}

static TRITONSERVER_Error* respond(
    TRITONBACKEND_Request* request, TRITONBACKEND_Response* response, const Tensor* first, uint32_t inputs)
{
  TRITONBACKEND_Output* output;
  void* buffer;
  int memory = MEMORY_CPU;
  int64_t id = 0;
  RETURN_IF_ERROR(TRITONBACKEND_ResponseOutput(response, &output, "y", first->datatype, first->shape, first->dims));
  RETURN_IF_ERROR(TRITONBACKEND_OutputBuffer(output, &buffer, first->size, &memory, &id));
  if (memory > 1) return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "expected an output in the memory of the host");
  return compute(request, first, inputs, buffer);
}

static TRITONSERVER_Error* answer(TRITONBACKEND_Request* request, long responses, const Tensor* first)
{
  uint32_t inputs;
  RETURN_IF_ERROR(TRITONBACKEND_RequestInputCount(request, &inputs));
  TRITONBACKEND_Response* response;
  if (responses == 0) {
    RETURN_IF_ERROR(TRITONBACKEND_ResponseNew(&response, request));
    return TRITONBACKEND_ResponseSend(response, COMPLETE_FINAL, respond(request, response, first, inputs));
  }
  TRITONBACKEND_ResponseFactory* factory;
  RETURN_IF_ERROR(TRITONBACKEND_ResponseFactoryNew(&factory, request));
  for (long number = 1; number <= responses; ++number) {
    RETURN_IF_ERROR(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
    TRITONSERVER_Error* error = respond(request, response, first, inputs);
    RETURN_IF_ERROR(TRITONBACKEND_ResponseSend(response, number == responses ? COMPLETE_FINAL : 0, error));
  }
  return TRITONBACKEND_ResponseFactoryDelete(factory);
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count)
{
  TRITONBACKEND_Model* model;
  void* state;
  RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceModel(instance, &model));
  RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &state));
  const Settings* settings = state;
  const uint64_t start = now_ns();
  uint64_t rows = 0;
  for (uint32_t index = 0; index < count; ++index) {
    Tensor first;
    RETURN_IF_ERROR(tensor_of(requests[index], 0, &first));
    rows += (uint64_t)first.shape[0];
  }
  const uint64_t us = (uint64_t)settings->batch_us + (uint64_t)settings->row_us * rows;
  if (us > 0) {
    const struct timespec pause = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    nanosleep(&pause, NULL);
  }
  for (uint32_t index = 0; index < count; ++index) {
    Tensor first;
    TRITONSERVER_Error* error = tensor_of(requests[index], 0, &first);
    if (error == NULL) error = answer(requests[index], settings->responses, &first);
    if (error != NULL) TRITONSERVER_ErrorDelete(error);  // the caller waits in vain, which the check before timing finds
    const uint64_t end = now_ns();
    error = TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[index], error == NULL, start, start, end, end);
    if (error != NULL) TRITONSERVER_ErrorDelete(error);
    error = TRITONBACKEND_RequestRelease(requests[index], RELEASE_ALL);
    if (error != NULL) TRITONSERVER_ErrorDelete(error);
  }
  const uint64_t end = now_ns();
  return TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, rows, start, start, end, end);
}
