#include "limits.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace pytriton::guard {

namespace {

bool ParsePair(const std::string& pair, Limits* limits, std::string* error) {
  const size_t equals = pair.find('=');
  const std::string name = pair.substr(0, equals);
  const std::string text = equals == std::string::npos ? "" : pair.substr(equals + 1);
  for (const LimitField& field : kLimitFields) {
    if (name != field.name) continue;
    errno = 0;
    const uint64_t value = std::strtoull(text.c_str(), nullptr, 10);
    if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos || errno != 0 ||
        value < field.least) {
      *error = name + " must be a whole number of at least " + std::to_string(field.least) + ", got '" + text + "'";
      return false;
    }
    limits->*field.value = value;
    return true;
  }
  *error = "'" + name + "' is no setting of the guard";
  return false;
}

// The number in a file of the control groups; the largest number if there is no file or it says "max".
uint64_t NumberIn(const char* path) {
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return UINT64_MAX;
  uint64_t value = UINT64_MAX;
  if (std::fscanf(file, "%" SCNu64, &value) != 1) value = UINT64_MAX;
  std::fclose(file);
  return value;
}

}  // namespace

bool ParseLimits(const std::string& text, Limits* limits, std::string* error) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin && !ParsePair(text.substr(begin, end - begin), limits, error)) return false;
    begin = end + 1;
  }
  return true;
}

uint64_t MemoryOfThisMachine() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGESIZE);
  uint64_t memory = pages > 0 && page > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page) : UINT64_MAX;
  memory = std::min(memory, NumberIn("/sys/fs/cgroup/memory.max"));
  return std::min(memory, NumberIn("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
}

std::string Bytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace pytriton::guard
