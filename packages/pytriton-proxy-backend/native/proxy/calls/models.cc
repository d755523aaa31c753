#include "models.h"

#include <cstdint>

namespace pytriton {

Failure LoadModel(const CallContext& context, const std::string& name, const CallRecord& in) {
  Parameters parameters;
  for (const auto& parameter : in.Parameters()) {
    if (parameter.type != TRITONSERVER_PARAMETER_STRING) {
      return {TRITONSERVER_ERROR_INVALID_ARG, std::string("parameter '") + parameter.key + "' of a load is no text"};
    }
    parameters.Add(TRITONSERVER_ParameterNew(parameter.key, TRITONSERVER_PARAMETER_STRING, parameter.text));
  }
  for (const auto& file : in.tensors()) {
    parameters.Add(TRITONSERVER_ParameterBytesNew(file.name, file.payload, file.payload_length));
  }
  return Take(TRITONSERVER_ServerLoadModelWithParameters(
      context.server, name.c_str(), parameters.data(), parameters.size()));
}

Failure UnloadModel(const CallContext& context, const std::string& name, bool dependents) {
  return Take(
      dependents ? TRITONSERVER_ServerUnloadModelAndDependents(context.server, name.c_str())
                        : TRITONSERVER_ServerUnloadModel(context.server, name.c_str()));
}

Failure WriteLog(const CallBody& body, const std::string& file, const CallRecord& in) {
  const auto parameters = in.Parameters();
  if (body.subject < TRITONSERVER_LOG_INFO || body.subject > TRITONSERVER_LOG_VERBOSE || parameters.size() != 1 ||
      parameters[0].type != TRITONSERVER_PARAMETER_STRING) {
    return {TRITONSERVER_ERROR_INVALID_ARG, "a record of the log has a level of Triton's and one text"};
  }
  const auto level = static_cast<TRITONSERVER_LogLevel>(body.subject);
  if (!TRITONSERVER_LogIsEnabled(level)) return {};
  const int line = body.value >= 0 && body.value <= INT32_MAX ? static_cast<int>(body.value) : 0;
  return Take(TRITONSERVER_LogMessage(level, file.c_str(), line, parameters[0].text));
}

}  // namespace pytriton
