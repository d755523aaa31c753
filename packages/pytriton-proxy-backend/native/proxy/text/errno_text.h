// What the last failed call of the system says.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

namespace pytriton {

// Names the system call and says why it failed, and which limit to raise if one was reached.
inline std::string Errno(const char* call) {
  const int code = errno;
  const std::string text = std::string(call) + ": " + std::strerror(code);
  if (code == EMFILE) return text + " (see ulimit -n)";
  return code == EFBIG ? text + " (see ulimit -f, which holds for shared memory, too)" : text;
}

}  // namespace pytriton
