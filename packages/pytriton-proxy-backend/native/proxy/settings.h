// The side file `pytriton.conf` in a model's version folder: what the proxy must know and Triton's API does not tell.
#pragma once

#include <string>

#include "settings_table.h"
#include "shared_limits.h"

namespace pytriton {

// Reads a side file. False with the file and the reason.
bool ReadSettings(const std::string& path, Settings* settings, std::string* error);

// `text` is lines of `key = value`; `#` begins a comment line. False with the line and the reason.
bool ParseSettings(const std::string& text, Settings* settings, std::string* error);

}  // namespace pytriton
