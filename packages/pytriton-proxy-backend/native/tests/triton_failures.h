// Functions of a double of Triton that fail: each call in turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "triton_errors.h"

// The call of a function that fails, counted from the first of all that may; negative for none.
inline int64_t failing_call = -1;
inline std::atomic<int64_t> calls{0};
inline std::string failed_function;

inline TRITONSERVER_Error* Fails(const char* function) {
  if (failing_call < 0 || calls++ != failing_call) return nullptr;
  failed_function = function;
  // An error without a text is one, too.
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "");
}

#define MAY_FAIL \
  if (TRITONSERVER_Error* failed = Fails(__func__); failed != nullptr) return failed
