// The response cache of Triton's core, which answers before a backend is asked, and wrongly: it takes failures for empty
// answers, and requests of other shapes, parameters or outputs for the same.
#pragma once

#include <string>

#include "triton_api.h"

namespace pytriton {

// An error for a model whose configuration has that cache on, where the process has one; `remedy` is what to do instead.
TRITONSERVER_Error* RefuseCoreCache(
    const std::string& model, const std::string& configuration, const std::string& remedy);

}  // namespace pytriton
