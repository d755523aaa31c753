// The functions of Triton through a table, for a library that is loaded into a process whose Triton keeps its symbols
// to itself (RTLD_LOCAL). Included before everything else, so that what is shared with the proxy needs no change.
#pragma once

#include "../proxy/triton_api.h"

// Without the beginning of their names: those are macros below, and an argument of a macro is expanded.
#define PYTRITON_TRITON_FUNCTIONS(ENTRY)                      \
  ENTRY(SERVER_ErrorNew)                                \
  ENTRY(SERVER_ErrorDelete)                             \
  ENTRY(SERVER_ErrorMessage)                            \
  ENTRY(SERVER_LogIsEnabled)                            \
  ENTRY(SERVER_LogMessage)                              \
  ENTRY(SERVER_MessageSerializeToJson)                  \
  ENTRY(SERVER_MessageDelete)                           \
  ENTRY(SERVER_ParameterNew)                            \
  ENTRY(SERVER_ParameterDelete)                         \
  ENTRY(BACKEND_ModelConfig)                            \
  ENTRY(BACKEND_ModelName)                              \
  ENTRY(BACKEND_ModelVersion)                           \
  ENTRY(BACKEND_ModelRepository)                        \
  ENTRY(BACKEND_ModelState)                             \
  ENTRY(BACKEND_ModelSetState)                          \
  ENTRY(BACKEND_ModelInstanceModel)                     \
  ENTRY(BACKEND_ModelInstanceState)                     \
  ENTRY(BACKEND_ModelInstanceSetState)                  \
  ENTRY(BACKEND_RequestId)                              \
  ENTRY(BACKEND_RequestCorrelationId)                   \
  ENTRY(BACKEND_RequestCorrelationIdString)             \
  ENTRY(BACKEND_RequestFlags)                           \
  ENTRY(BACKEND_InferenceRequestTimeoutMicroseconds)    \
  ENTRY(BACKEND_RequestIsCancelled)                     \
  ENTRY(BACKEND_RequestParameterCount)                  \
  ENTRY(BACKEND_RequestParameter)                       \
  ENTRY(BACKEND_RequestInputCount)                      \
  ENTRY(BACKEND_RequestInputByIndex)                    \
  ENTRY(BACKEND_RequestOutputCount)                     \
  ENTRY(BACKEND_RequestOutputName)                      \
  ENTRY(BACKEND_RequestRelease)                         \
  ENTRY(BACKEND_RequestTrace)                           \
  ENTRY(BACKEND_InputProperties)                        \
  ENTRY(BACKEND_InputBuffer)                            \
  ENTRY(BACKEND_ResponseFactoryNew)                     \
  ENTRY(BACKEND_ResponseFactoryDelete)                  \
  ENTRY(BACKEND_ResponseFactorySendFlags)               \
  ENTRY(BACKEND_ResponseFactoryIsCancelled)             \
  ENTRY(BACKEND_ResponseNew)                            \
  ENTRY(BACKEND_ResponseNewFromFactory)                 \
  ENTRY(BACKEND_ResponseDelete)                         \
  ENTRY(BACKEND_ResponseSetStringParameter)             \
  ENTRY(BACKEND_ResponseSetIntParameter)                \
  ENTRY(BACKEND_ResponseSetBoolParameter)               \
  ENTRY(BACKEND_ResponseSetDoubleParameter)             \
  ENTRY(BACKEND_ResponseOutput)                         \
  ENTRY(BACKEND_OutputBuffer)                           \
  ENTRY(BACKEND_ResponseSend)                           \
  ENTRY(BACKEND_ModelInstanceReportStatistics)          \
  ENTRY(BACKEND_ModelInstanceReportBatchStatistics)

// May be missing in a server; what calls them looks first.
#define PYTRITON_OPTIONAL_TRITON_FUNCTIONS(ENTRY)  \
  ENTRY(SERVER_InferenceRequestPriorityUInt64) \
  ENTRY(SERVER_InferenceTraceContext)          \
  ENTRY(SERVER_MetricFamilyNew)                \
  ENTRY(SERVER_MetricNew)                      \
  ENTRY(SERVER_MetricDelete)                   \
  ENTRY(SERVER_MetricIncrement)

namespace pytriton {

struct TritonTable {
#define PYTRITON_DECLARE(name) decltype(&::TRITON##name) TRITON##name##_;
  PYTRITON_TRITON_FUNCTIONS(PYTRITON_DECLARE)
  PYTRITON_OPTIONAL_TRITON_FUNCTIONS(PYTRITON_DECLARE)
#undef PYTRITON_DECLARE
};

extern TritonTable triton_table;

}  // namespace pytriton

// One line for each, as a macro cannot define macros.
#define TRITONSERVER_ErrorNew (::pytriton::triton_table.TRITONSERVER_ErrorNew_)
#define TRITONSERVER_ErrorDelete (::pytriton::triton_table.TRITONSERVER_ErrorDelete_)
#define TRITONSERVER_ErrorMessage (::pytriton::triton_table.TRITONSERVER_ErrorMessage_)
#define TRITONSERVER_LogIsEnabled (::pytriton::triton_table.TRITONSERVER_LogIsEnabled_)
#define TRITONSERVER_LogMessage (::pytriton::triton_table.TRITONSERVER_LogMessage_)
#define TRITONSERVER_MessageSerializeToJson (::pytriton::triton_table.TRITONSERVER_MessageSerializeToJson_)
#define TRITONSERVER_MessageDelete (::pytriton::triton_table.TRITONSERVER_MessageDelete_)
#define TRITONBACKEND_ModelConfig (::pytriton::triton_table.TRITONBACKEND_ModelConfig_)
#define TRITONBACKEND_ModelName (::pytriton::triton_table.TRITONBACKEND_ModelName_)
#define TRITONBACKEND_ModelVersion (::pytriton::triton_table.TRITONBACKEND_ModelVersion_)
#define TRITONBACKEND_ModelRepository (::pytriton::triton_table.TRITONBACKEND_ModelRepository_)
#define TRITONBACKEND_ModelState (::pytriton::triton_table.TRITONBACKEND_ModelState_)
#define TRITONBACKEND_ModelSetState (::pytriton::triton_table.TRITONBACKEND_ModelSetState_)
#define TRITONBACKEND_ModelInstanceModel (::pytriton::triton_table.TRITONBACKEND_ModelInstanceModel_)
#define TRITONBACKEND_ModelInstanceState (::pytriton::triton_table.TRITONBACKEND_ModelInstanceState_)
#define TRITONBACKEND_ModelInstanceSetState (::pytriton::triton_table.TRITONBACKEND_ModelInstanceSetState_)
#define TRITONBACKEND_RequestId (::pytriton::triton_table.TRITONBACKEND_RequestId_)
#define TRITONBACKEND_RequestCorrelationId (::pytriton::triton_table.TRITONBACKEND_RequestCorrelationId_)
#define TRITONBACKEND_RequestCorrelationIdString (::pytriton::triton_table.TRITONBACKEND_RequestCorrelationIdString_)
#define TRITONBACKEND_RequestFlags (::pytriton::triton_table.TRITONBACKEND_RequestFlags_)
#define TRITONBACKEND_InferenceRequestTimeoutMicroseconds (::pytriton::triton_table.TRITONBACKEND_InferenceRequestTimeoutMicroseconds_)
#define TRITONBACKEND_RequestIsCancelled (::pytriton::triton_table.TRITONBACKEND_RequestIsCancelled_)
#define TRITONBACKEND_RequestParameterCount (::pytriton::triton_table.TRITONBACKEND_RequestParameterCount_)
#define TRITONBACKEND_RequestParameter (::pytriton::triton_table.TRITONBACKEND_RequestParameter_)
#define TRITONBACKEND_RequestInputCount (::pytriton::triton_table.TRITONBACKEND_RequestInputCount_)
#define TRITONBACKEND_RequestInputByIndex (::pytriton::triton_table.TRITONBACKEND_RequestInputByIndex_)
#define TRITONBACKEND_RequestOutputCount (::pytriton::triton_table.TRITONBACKEND_RequestOutputCount_)
#define TRITONBACKEND_RequestOutputName (::pytriton::triton_table.TRITONBACKEND_RequestOutputName_)
#define TRITONBACKEND_RequestRelease (::pytriton::triton_table.TRITONBACKEND_RequestRelease_)
#define TRITONBACKEND_RequestTrace (::pytriton::triton_table.TRITONBACKEND_RequestTrace_)
#define TRITONBACKEND_InputProperties (::pytriton::triton_table.TRITONBACKEND_InputProperties_)
#define TRITONBACKEND_InputBuffer (::pytriton::triton_table.TRITONBACKEND_InputBuffer_)
#define TRITONBACKEND_ResponseFactoryNew (::pytriton::triton_table.TRITONBACKEND_ResponseFactoryNew_)
#define TRITONBACKEND_ResponseFactoryDelete (::pytriton::triton_table.TRITONBACKEND_ResponseFactoryDelete_)
#define TRITONBACKEND_ResponseFactorySendFlags (::pytriton::triton_table.TRITONBACKEND_ResponseFactorySendFlags_)
#define TRITONBACKEND_ResponseFactoryIsCancelled (::pytriton::triton_table.TRITONBACKEND_ResponseFactoryIsCancelled_)
#define TRITONBACKEND_ResponseNew (::pytriton::triton_table.TRITONBACKEND_ResponseNew_)
#define TRITONBACKEND_ResponseNewFromFactory (::pytriton::triton_table.TRITONBACKEND_ResponseNewFromFactory_)
#define TRITONBACKEND_ResponseDelete (::pytriton::triton_table.TRITONBACKEND_ResponseDelete_)
#define TRITONBACKEND_ResponseSetStringParameter (::pytriton::triton_table.TRITONBACKEND_ResponseSetStringParameter_)
#define TRITONBACKEND_ResponseSetIntParameter (::pytriton::triton_table.TRITONBACKEND_ResponseSetIntParameter_)
#define TRITONBACKEND_ResponseSetBoolParameter (::pytriton::triton_table.TRITONBACKEND_ResponseSetBoolParameter_)
#define TRITONBACKEND_ResponseSetDoubleParameter (::pytriton::triton_table.TRITONBACKEND_ResponseSetDoubleParameter_)
#define TRITONBACKEND_ResponseOutput (::pytriton::triton_table.TRITONBACKEND_ResponseOutput_)
#define TRITONBACKEND_OutputBuffer (::pytriton::triton_table.TRITONBACKEND_OutputBuffer_)
#define TRITONBACKEND_ResponseSend (::pytriton::triton_table.TRITONBACKEND_ResponseSend_)
#define TRITONBACKEND_ModelInstanceReportStatistics (::pytriton::triton_table.TRITONBACKEND_ModelInstanceReportStatistics_)
#define TRITONBACKEND_ModelInstanceReportBatchStatistics (::pytriton::triton_table.TRITONBACKEND_ModelInstanceReportBatchStatistics_)
#define TRITONSERVER_InferenceRequestPriorityUInt64 (::pytriton::triton_table.TRITONSERVER_InferenceRequestPriorityUInt64_)
#define TRITONSERVER_InferenceTraceContext (::pytriton::triton_table.TRITONSERVER_InferenceTraceContext_)
#define TRITONSERVER_ParameterNew (::pytriton::triton_table.TRITONSERVER_ParameterNew_)
#define TRITONSERVER_ParameterDelete (::pytriton::triton_table.TRITONSERVER_ParameterDelete_)
#define TRITONSERVER_MetricFamilyNew (::pytriton::triton_table.TRITONSERVER_MetricFamilyNew_)
#define TRITONSERVER_MetricNew (::pytriton::triton_table.TRITONSERVER_MetricNew_)
#define TRITONSERVER_MetricDelete (::pytriton::triton_table.TRITONSERVER_MetricDelete_)
#define TRITONSERVER_MetricIncrement (::pytriton::triton_table.TRITONSERVER_MetricIncrement_)
