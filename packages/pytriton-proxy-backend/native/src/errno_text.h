// What the last failed call of the system says.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

namespace pytriton {

// The call and why it failed; where no file descriptor is left, also the limit to raise.
inline std::string Errno(const char* call) {
  const int code = errno;
  const std::string text = std::string(call) + ": " + std::strerror(code);
  return code == EMFILE ? text + " (see ulimit -n)" : text;
}

}  // namespace pytriton
