// What a worker wants of the models of the server, and of its log.
#pragma once

#include <string>

#include "../calls.h"
#include "../record.h"
#include "failure.h"

namespace pytriton {

// Loads or unloads a model, which takes as long as the model likes.
Failure LoadModel(const CallContext& context, const std::string& name, const CallRecord& in);
Failure UnloadModel(const CallContext& context, const std::string& name, bool dependents);

Failure WriteLog(const CallBody& body, const std::string& file, const CallRecord& in);

}  // namespace pytriton
