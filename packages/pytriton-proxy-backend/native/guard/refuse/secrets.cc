#include "secrets.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "../shared.h"

namespace pytriton::guard {
namespace {

// Reads a descriptor from its beginning to its end.
std::string ReadAll(int fd) {
  std::string text;
  char buffer[4096];
  for (off_t offset = 0;;) {
    const ssize_t count = pread(fd, buffer, sizeof(buffer), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(buffer, static_cast<size_t>(count));
    offset += count;
  }
}

}  // namespace

// The descriptor holds lines: a mark, its secret, the next mark and so on.
void ReadSecrets(int argc, char** argv) {
  const char* given = std::getenv(kGuardSecretsVariable);
  if (given == nullptr) return;
  const int fd = std::atoi(given);
  unsetenv(kGuardSecretsVariable);
  const std::string lines = ReadAll(fd);
  close(fd);
  for (size_t begin = 0; begin < lines.size();) {
    const size_t middle = lines.find('\n', begin);
    if (middle == std::string::npos) return;
    const size_t end = std::min(lines.find('\n', middle + 1), lines.size());
    const std::string mark = lines.substr(begin, middle - begin);
    const std::string secret = lines.substr(middle + 1, end - middle - 1);
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (mark.empty() || argument.size() < mark.size() ||
          argument.compare(argument.size() - mark.size(), mark.size(), mark) != 0) {
        continue;
      }
      // This is never freed, because it is an argument of `main` from now on.
      argv[i] = strdup((argument.substr(0, argument.size() - mark.size()) + secret).c_str());
    }
    begin = end + 1;
  }
}

bool RestrictsModels(int argc, char** argv) {
  constexpr std::string_view kOption = "--http-restricted-api";
  for (int i = 1; i < argc; ++i) {
    std::string_view value = argv[i];
    if (value.substr(0, kOption.size()) != kOption) continue;
    value.remove_prefix(kOption.size());
    if (value.empty() && i + 1 < argc) value = argv[i + 1];
    // "=metadata,health:header=secret"
    const std::string_view groups = value.substr(0, value.find(':'));
    if (groups.find("metadata") != std::string_view::npos || groups.find("model-config") != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace pytriton::guard
