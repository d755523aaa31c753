// The errors of a double of Triton, counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "../proxy/triton/triton_api.h"

struct TRITONSERVER_Error {
  TRITONSERVER_Error_Code code;
  std::string text;
};

// Those that were made and not deleted.
inline std::atomic<int64_t> errors{0};
extern "C" {

TRITONSERVER_Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* text) {
  ++errors;
  return new TRITONSERVER_Error{code, text};
}
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error) {
  --errors;
  delete error;
}
TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(TRITONSERVER_Error* error) { return error->code; }
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error* error) { return error->text.c_str(); }

}  // extern "C"
