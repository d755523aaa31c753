// What the guard asks the server: its models, their tensors, and the page made of them.
#pragma once

#include <memory>
#include <string>

#include "../in_force.h"
#include "generate_errors.h"
#include "http_response.h"

namespace pytriton::guard {

// The inputs and outputs of a model; empty if there is no such model.
ModelInterface InterfaceOf(Guard* guard, const std::string& model, int64_t version);

// Makes the page about the server, which replaces the answer to a path that the server does not have.
std::unique_ptr<HttpResponse> PageFor(Guard* guard, int fd, bool is_html);

// Whether any version of a model is served.
bool HasModel(const std::string& model);

}  // namespace pytriton::guard
