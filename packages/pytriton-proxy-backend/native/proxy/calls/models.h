// Carries out what workers ask about the server's models, and writes their records into its log.
#pragma once

#include <string>

#include "../wire/record.h"
#include "calls.h"
#include "failure.h"

namespace pytriton {

// Loads or unloads a model, which takes as long as the model needs.
Failure LoadModel(const CallContext& context, const std::string& name, const CallRecord& in);
Failure UnloadModel(const CallContext& context, const std::string& name, bool dependents);

Failure WriteLog(const CallBody& body, const std::string& file, const CallRecord& in);

}  // namespace pytriton
