// Parts of the texts of errors by which the guard tells apart what Triton has one code for. Callers see them.
#pragma once

#include <string_view>

namespace pytriton {

constexpr std::string_view kTimeLimitText = "took longer for this request than the model's execution timeout";
constexpr std::string_view kWorkerLostText = "was lost while it worked on this request";

}  // namespace pytriton
