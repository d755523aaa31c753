// The side file `pytriton.conf` in a model's version folder: what the proxy must know and Triton's API does not tell.
#pragma once

#include <string>

#include "settings_table.h"

namespace pytriton {

constexpr char kSideFileName[] = "pytriton.conf";

// As of `ReadSettings`: the file beside the library as the backend of Python models, whose endpoint is the socket of the
// supervisor.
constexpr char kHostsFileName[] = "pytriton-hosts.conf";
// Environment variable with the path of such a file, set by who starts the server and the processes: it counts for
// models that were converted, too.
constexpr char kHostsVariable[] = "PYTRITON_HOSTS_FILE";

// Reads a side file. False with the file and the reason.
bool ReadSettings(const std::string& path, Settings* settings, std::string* error);

// `text` is lines of `key = value`; `#` begins a comment line. False with the line and the reason.
bool ParseSettings(const std::string& text, Settings* settings, std::string* error);

}  // namespace pytriton
