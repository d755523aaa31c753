// How a request is refused: a line in the log, and an error of Triton's for its caller.
#pragma once

#include <string>

#include "../triton.h"

namespace pytriton::guard {

// Logs why a request was refused. Refusals come in bursts, so there is at most one line a second.
void LogRefusal(const std::string& text);

// Makes an error of Triton for its caller, and logs it as a refusal.
TRITONSERVER_Error* Error(int code, const std::string& text);

}  // namespace pytriton::guard
