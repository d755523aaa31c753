// The side file `pytriton.conf` in a model's version folder: what the proxy must know and cannot learn from Triton's
// API.
#pragma once

#include <string>

#include "settings_table.h"
#include "shared_limits.h"

namespace pytriton {

// Reads a side file. Returns false with its path and the reason.
bool ReadSettings(const std::string& path, Settings* settings, std::string* error);

// `text` has lines of `key = value`; `#` begins a comment line. Returns false with the line and the reason.
bool ParseSettings(const std::string& text, Settings* settings, std::string* error);

}  // namespace pytriton
