// Small conveniences around Triton's C API.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>

#include "../text/printable.h"
#include "triton_api.h"

namespace pytriton {

// Returns the text of an error that a call returned, or "" if it succeeded. Takes the error over.
inline std::string TakeMessage(TRITONSERVER_Error* error) {
  if (error == nullptr) return "";
  std::string text = TRITONSERVER_ErrorMessage(error);
  TRITONSERVER_ErrorDelete(error);
  return text.empty() ? "unknown error" : text;
}

// Whether a call failed; if so, `error` is set to its text. Takes the result over.
inline bool Failed(TRITONSERVER_Error* result, std::string* error) {
  if (result == nullptr) return false;
  *error = TakeMessage(result);
  return true;
}

// Whether a call succeeded, for callers that do not need the reason. Takes the result over.
inline bool Succeeded(TRITONSERVER_Error* result) {
  if (result == nullptr) return true;
  TRITONSERVER_ErrorDelete(result);
  return false;
}

inline TRITONSERVER_Error* MakeError(TRITONSERVER_Error_Code code, const std::string& text) {
  return TRITONSERVER_ErrorNew(code, text.c_str());
}

inline void Log(TRITONSERVER_LogLevel level, const char* file, int line, const std::string& text) {
  if (!TRITONSERVER_LogIsEnabled(level)) return;
  TakeMessage(TRITONSERVER_LogMessage(level, file, line, Printable(text).c_str()));
}

#define PYTRITON_LOG(level, text) ::pytriton::Log(TRITONSERVER_LOG_##level, __FILE__, __LINE__, (text))

// Logs the error of a call if nobody could be answered with it.
#define PYTRITON_LOG_IF_ERROR(call, what)                                                                          \
  do {                                                                                                             \
    TRITONSERVER_Error* pytriton_failed = (call);                                                                  \
    if (pytriton_failed != nullptr) {                                                                              \
      PYTRITON_LOG(ERROR, std::string(what) + ": " + ::pytriton::TakeMessage(pytriton_failed));                    \
    }                                                                                                              \
  } while (false)

// Sets `text` to the JSON of a message.
inline TRITONSERVER_Error* TextOf(TRITONSERVER_Message* message, std::string* text) {
  const char* base = nullptr;
  size_t size = 0;
  TRITONSERVER_Error* error = TRITONSERVER_MessageSerializeToJson(message, &base, &size);
  if (error == nullptr) text->assign(base, size);
  return error;
}

inline TRITONSERVER_Error* ConfigurationOf(TRITONBACKEND_Model* model, std::string* text) {
  TRITONSERVER_Message* message = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelConfig(model, kConfigVersion, &message)) return error;
  TRITONSERVER_Error* error = TextOf(message, text);
  PYTRITON_LOG_IF_ERROR(TRITONSERVER_MessageDelete(message), "deleting a message");
  return error;
}

inline uint64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace pytriton
