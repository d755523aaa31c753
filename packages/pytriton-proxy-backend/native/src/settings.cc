#include "settings.h"

#include <sys/un.h>

#include <cerrno>
#include <cstdlib>
#include <sstream>

namespace pytriton {

namespace {

constexpr char kFormat[] = "1";

std::string Trim(const std::string& text) {
  const char* blank = " \t\r";
  const auto begin = text.find_first_not_of(blank);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(blank) - begin + 1);
}

bool ParseNumber(const std::string& text, uint64_t* value) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  errno = 0;
  *value = std::strtoull(text.c_str(), nullptr, 10);
  return errno == 0;
}

bool ParseBool(const std::string& text, bool* value) {
  *value = text == "true";
  return *value || text == "false";
}

}  // namespace

bool ParseSettings(const std::string& text, Settings* settings, std::string* error) {
  std::istringstream lines(text);
  std::string line;
  std::string format;
  for (int number = 1; std::getline(lines, line); ++number) {
    line = Trim(line);
    if (line.empty() || line[0] == '#') continue;
    const auto equals = line.find('=');
    const std::string key = Trim(line.substr(0, equals));
    const std::string value = equals == std::string::npos ? "" : Trim(line.substr(equals + 1));
    bool good = true;
    const char* expected = "a whole number";
    if (equals == std::string::npos) {
      expected = "'key = value'";
      good = false;
    } else if (key == "format") {
      format = value;
    } else if (key == "endpoint") {
      settings->endpoint = value;
      expected = "an absolute path";
      good = !value.empty() && value[0] == '/';
    } else if (key == "batching" || key == "decoupled" || key == "repeatable") {
      expected = "true or false";
      good = ParseBool(
          value, key == "batching"    ? &settings->batching
                 : key == "decoupled" ? &settings->decoupled
                                      : &settings->repeatable);
    } else if (key == "tensors_digest") {
      settings->tensors_digest = value;
      expected = "hexadecimal digits";
      good = !value.empty() && value.find_first_not_of("0123456789abcdef") == std::string::npos;
    } else if (key == "attach_timeout_ms") {
      good = ParseNumber(value, &settings->attach_timeout_ms);
    } else if (key == "max_waiting") {
      good = ParseNumber(value, &settings->max_waiting);
    } else if (key == "arena_budget_bytes") {
      good = ParseNumber(value, &settings->arena_budget_bytes) && settings->arena_budget_bytes != 0;
      expected = "a whole number above 0";
    } else if (key == "arena_idle_ms") {
      good = ParseNumber(value, &settings->arena_idle_ms);
    } else if (key == "execution_timeout_ms") {
      // In nanoseconds it has to fit into 64 bits; 285 years do.
      good = ParseNumber(value, &settings->execution_timeout_ms) && settings->execution_timeout_ms <= 9000000000000u;
      expected = "a whole number up to 9000000000000";
    } else {
      expected = "a key that this version knows";
      good = false;
    }
    if (!good) {
      *error = std::string(kSideFileName) + ", line " + std::to_string(number) + ": expected " + expected +
               ", got '" + line + "'";
      return false;
    }
  }
  if (format != kFormat) {
    *error = std::string(kSideFileName) + ": expected 'format = " + kFormat + "', got '" + format +
             "'; write the file with the same version of pytriton-proxy-backend as this library";
    return false;
  }
  if (settings->endpoint.empty()) {
    *error = std::string(kSideFileName) + ": expected 'endpoint = <path of a unix socket>', got none";
    return false;
  }
  constexpr size_t kLimit = sizeof(sockaddr_un::sun_path) - 1;
  if (settings->endpoint.size() > kLimit) {
    *error = std::string(kSideFileName) + ": the endpoint has " + std::to_string(settings->endpoint.size()) +
             " bytes, the path of a unix socket may have " + std::to_string(kLimit) + ": '" + settings->endpoint +
             "'; choose a shorter folder";
    return false;
  }
  return true;
}

}  // namespace pytriton
