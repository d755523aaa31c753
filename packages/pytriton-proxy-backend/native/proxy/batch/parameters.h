// The parameters of Triton's requests as those of a record.
#pragma once

#include <cstring>

#include "../triton/triton_api.h"
#include "../wire/record.h"

namespace pytriton {

// Adds a parameter of Triton's; its texts stay Triton's. Returns false if its type is unknown here.
inline bool AddParameter(
    const char* key, TRITONSERVER_ParameterType type, const void* value, RecordSource* source) {
  ParameterSource parameter{key, static_cast<uint32_t>(type), {}, 0};
  switch (type) {
    case TRITONSERVER_PARAMETER_STRING:
      parameter.text = static_cast<const char*>(value);
      break;
    case TRITONSERVER_PARAMETER_BOOL:
      parameter.value = *static_cast<const bool*>(value) ? 1 : 0;
      break;
    case TRITONSERVER_PARAMETER_INT:
    case TRITONSERVER_PARAMETER_DOUBLE:
      std::memcpy(&parameter.value, value, sizeof(parameter.value));
      break;
    default:
      return false;
  }
  source->parameters.push_back(parameter);
  return true;
}

}  // namespace pytriton
