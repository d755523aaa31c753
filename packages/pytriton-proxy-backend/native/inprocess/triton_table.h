// Triton's functions as pointers, for a library that is loaded into a process whose Triton keeps its symbols to itself
// (RTLD_LOCAL). This file is included before everything else. Each pointer has the name of its function, so code in the
// namespace calls through it, and the sources that are shared with the proxy need no change. A call from outside of the
// namespace does not link.
#pragma once

#include "../proxy/triton/triton_api.h"

#define PYTRITON_TRITON_FUNCTIONS(ENTRY)                         \
  ENTRY(TRITONSERVER_ErrorNew)                                   \
  ENTRY(TRITONSERVER_ErrorDelete)                                \
  ENTRY(TRITONSERVER_ErrorMessage)                               \
  ENTRY(TRITONSERVER_LogIsEnabled)                               \
  ENTRY(TRITONSERVER_LogMessage)                                 \
  ENTRY(TRITONSERVER_MessageSerializeToJson)                     \
  ENTRY(TRITONSERVER_MessageDelete)                              \
  ENTRY(TRITONSERVER_ParameterNew)                               \
  ENTRY(TRITONSERVER_ParameterDelete)                            \
  ENTRY(TRITONSERVER_ErrorCode)                                  \
  ENTRY(TRITONSERVER_InferenceRequestAddInput)                   \
  ENTRY(TRITONSERVER_InferenceRequestAppendInputData)            \
  ENTRY(TRITONSERVER_InferenceRequestCancel)                     \
  ENTRY(TRITONSERVER_InferenceRequestDelete)                     \
  ENTRY(TRITONSERVER_InferenceRequestNew)                        \
  ENTRY(TRITONSERVER_InferenceRequestSetReleaseCallback)         \
  ENTRY(TRITONSERVER_InferenceRequestSetResponseCallback)        \
  ENTRY(TRITONSERVER_InferenceResponseDelete)                    \
  ENTRY(TRITONSERVER_InferenceResponseError)                     \
  ENTRY(TRITONSERVER_InferenceResponseModel)                     \
  ENTRY(TRITONSERVER_InferenceResponseOutput)                    \
  ENTRY(TRITONSERVER_InferenceResponseOutputClassificationLabel) \
  ENTRY(TRITONSERVER_InferenceResponseOutputCount)               \
  ENTRY(TRITONSERVER_InferenceResponseParameter)                 \
  ENTRY(TRITONSERVER_InferenceResponseParameterCount)            \
  ENTRY(TRITONSERVER_ResponseAllocatorNew)                       \
  ENTRY(TRITONSERVER_ServerInferAsync)                           \
  ENTRY(TRITONBACKEND_ModelConfig)                               \
  ENTRY(TRITONBACKEND_ModelName)                                 \
  ENTRY(TRITONBACKEND_ModelVersion)                              \
  ENTRY(TRITONBACKEND_ModelRepository)                           \
  ENTRY(TRITONBACKEND_ModelState)                                \
  ENTRY(TRITONBACKEND_ModelSetState)                             \
  ENTRY(TRITONBACKEND_ModelInstanceModel)                        \
  ENTRY(TRITONBACKEND_ModelInstanceState)                        \
  ENTRY(TRITONBACKEND_ModelInstanceSetState)                     \
  ENTRY(TRITONBACKEND_RequestId)                                 \
  ENTRY(TRITONBACKEND_RequestCorrelationId)                      \
  ENTRY(TRITONBACKEND_RequestCorrelationIdString)                \
  ENTRY(TRITONBACKEND_RequestFlags)                              \
  ENTRY(TRITONBACKEND_InferenceRequestTimeoutMicroseconds)       \
  ENTRY(TRITONBACKEND_RequestIsCancelled)                        \
  ENTRY(TRITONBACKEND_RequestParameterCount)                     \
  ENTRY(TRITONBACKEND_RequestParameter)                          \
  ENTRY(TRITONBACKEND_RequestInputCount)                         \
  ENTRY(TRITONBACKEND_RequestInputByIndex)                       \
  ENTRY(TRITONBACKEND_RequestOutputCount)                        \
  ENTRY(TRITONBACKEND_RequestOutputName)                         \
  ENTRY(TRITONBACKEND_RequestRelease)                            \
  ENTRY(TRITONBACKEND_RequestTrace)                              \
  ENTRY(TRITONBACKEND_InputProperties)                           \
  ENTRY(TRITONBACKEND_InputBuffer)                               \
  ENTRY(TRITONBACKEND_ResponseFactoryNew)                        \
  ENTRY(TRITONBACKEND_ResponseFactoryDelete)                     \
  ENTRY(TRITONBACKEND_ResponseFactorySendFlags)                  \
  ENTRY(TRITONBACKEND_ResponseFactoryIsCancelled)                \
  ENTRY(TRITONBACKEND_ResponseNew)                               \
  ENTRY(TRITONBACKEND_ResponseNewFromFactory)                    \
  ENTRY(TRITONBACKEND_ResponseDelete)                            \
  ENTRY(TRITONBACKEND_ResponseSetStringParameter)                \
  ENTRY(TRITONBACKEND_ResponseSetIntParameter)                   \
  ENTRY(TRITONBACKEND_ResponseSetBoolParameter)                  \
  ENTRY(TRITONBACKEND_ResponseSetDoubleParameter)                \
  ENTRY(TRITONBACKEND_ResponseOutput)                            \
  ENTRY(TRITONBACKEND_OutputBuffer)                              \
  ENTRY(TRITONBACKEND_ResponseSend)                              \
  ENTRY(TRITONBACKEND_ModelInstanceReportStatistics)             \
  ENTRY(TRITONBACKEND_ModelInstanceReportBatchStatistics)

// A server may lack these, so they are checked before they are called.
#define PYTRITON_OPTIONAL_TRITON_FUNCTIONS(ENTRY)    \
  ENTRY(TRITONSERVER_InferenceRequestPriorityUInt64) \
  ENTRY(TRITONSERVER_InferenceTraceContext)          \
  ENTRY(TRITONSERVER_MetricFamilyNew)                \
  ENTRY(TRITONSERVER_MetricNew)                      \
  ENTRY(TRITONSERVER_MetricDelete)                   \
  ENTRY(TRITONSERVER_MetricIncrement)

namespace pytriton {

#define PYTRITON_DECLARE(name) extern decltype(&::name) name;
PYTRITON_TRITON_FUNCTIONS(PYTRITON_DECLARE)
PYTRITON_OPTIONAL_TRITON_FUNCTIONS(PYTRITON_DECLARE)
#undef PYTRITON_DECLARE

}  // namespace pytriton
