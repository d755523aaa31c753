// The response cache in Triton's core answers requests before a backend sees them, and wrongly: it returns empty
// answers for failed requests, and does not distinguish requests by their shapes, parameters or wanted outputs.
#pragma once

#include <string>

#include "../triton/triton_api.h"

namespace pytriton {

// Returns an error for a model whose configuration turns that cache on, if the process has one. `remedy` says what to
// do instead.
TRITONSERVER_Error* RefuseCoreCache(
    const std::string& model, const std::string& configuration, const std::string& remedy);

}  // namespace pytriton
