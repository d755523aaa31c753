// The error of a call, as the callable that made the call gets it.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "../triton/triton_api.h"
#include "../triton/triton_util.h"

namespace pytriton {

// An error of a call: Triton's code and a text, which may be empty. No code means no error.
struct Failure {
  TRITONSERVER_Error_Code code = TRITONSERVER_ERROR_INTERNAL;
  std::string text;
  bool failed = false;

  Failure() = default;
  Failure(TRITONSERVER_Error_Code error_code, std::string error_text)
      : code(error_code), text(error_text.empty() ? "unknown error" : std::move(error_text)), failed(true) {}
  explicit operator bool() const { return failed; }
};

// Takes the error over.
inline Failure Take(TRITONSERVER_Error* error) {
  if (error == nullptr) return {};
  const TRITONSERVER_Error_Code code = TRITONSERVER_ErrorCode(error);
  return {code, TakeMessage(error)};
}

inline Failure Lacking(const char* what) {
  return {TRITONSERVER_ERROR_UNSUPPORTED, std::string("this tritonserver has no ") + what};
}

#define PYTRITON_FAIL_IF(call)                \
  do {                                        \
    Failure pytriton_failure = Take(call);    \
    if (pytriton_failure) return pytriton_failure; \
  } while (false)

// Parameters of Triton, which this list owns.
class Parameters {
 public:
  ~Parameters() {
    for (const auto* parameter : list_) TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
  }
  void Add(TRITONSERVER_Parameter* parameter) { list_.push_back(parameter); }
  const TRITONSERVER_Parameter** data() { return list_.data(); }
  uint64_t size() const { return list_.size(); }

 private:
  std::vector<const TRITONSERVER_Parameter*> list_;
};

// Runs a function out of which no exception may go into Triton. An exception then costs memory that is not freed,
// nothing else.
template <typename Function>
void Guarded(const char* what, Function function) {
  try {
    function();
  } catch (const std::exception& exception) {
    PYTRITON_LOG(ERROR, std::string(what) + ": " + exception.what());
  }
}

}  // namespace pytriton
