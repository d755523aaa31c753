// Small conveniences around Triton's C API.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>

#include "triton_api.h"

namespace pytriton {

// The text of an error that a call returned, "" where it succeeded. Takes the error over.
inline std::string TakeMessage(TRITONSERVER_Error* error) {
  if (error == nullptr) return "";
  std::string text = TRITONSERVER_ErrorMessage(error);
  TRITONSERVER_ErrorDelete(error);
  return text.empty() ? "unknown error" : text;
}

inline TRITONSERVER_Error* MakeError(TRITONSERVER_Error_Code code, const std::string& text) {
  return TRITONSERVER_ErrorNew(code, text.c_str());
}

inline void Log(TRITONSERVER_LogLevel level, const char* file, int line, const std::string& text) {
  if (TRITONSERVER_LogIsEnabled(level)) TakeMessage(TRITONSERVER_LogMessage(level, file, line, text.c_str()));
}

#define PYTRITON_LOG(level, text) ::pytriton::Log(TRITONSERVER_LOG_##level, __FILE__, __LINE__, (text))

// Logs the error of a call whose failure cannot be answered in a better way.
#define PYTRITON_LOG_IF_ERROR(call, what)                                                      \
  do {                                                                                         \
    const std::string pytriton_message = ::pytriton::TakeMessage(call);                        \
    if (!pytriton_message.empty()) PYTRITON_LOG(ERROR, std::string(what) + ": " + pytriton_message); \
  } while (false)

inline uint64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace pytriton
