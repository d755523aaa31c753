#include "settings.h"

#include <sys/un.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace pytriton {

namespace {

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

// Sets the value of a line. Returns false with what was expected.
bool SetValue(const std::string& key, const std::string& value, Settings* settings, std::string* expected) {
  for (const NumberSetting& number : kNumberSettings) {
    if (key != number.key) continue;
    uint64_t parsed = 0;
    *expected = number.expected;
    if (!ParseNumber(value, &parsed) || parsed < number.minimum || parsed > number.maximum) return false;
    settings->*number.value = parsed;
    return true;
  }
  for (const SwitchSetting& option : kSwitchSettings) {
    if (key != option.key) continue;
    *expected = "true or false";
    settings->*option.value = value == "true";
    return value == "true" || value == "false";
  }
  for (const TextSetting& text : kTextSettings) {
    if (key != text.key) continue;
    *expected = text.expected;
    settings->*text.value = value;
    return text.is_valid(value);
  }
  *expected = "a key that this version knows";
  return false;
}

}  // namespace

bool IsAbsolutePath(const std::string& text) { return !text.empty() && text[0] == '/'; }

bool IsHexadecimal(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool ReadSettings(const std::string& path, Settings* settings, std::string* error) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    *error = "the side file '" + path + "' cannot be read; pytriton-proxy-backend writes it beside the model";
    return false;
  }
  if (ParseSettings(text.str(), settings, error)) return true;
  *error = "'" + path + "': " + *error;
  return false;
}

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
    std::string expected = "'key = value'";
    bool good = equals != std::string::npos;
    if (good && key == "format") {
      format = value;
    } else if (good) {
      good = SetValue(key, value, settings, &expected);
    }
    if (!good) {
      *error = std::string(kSideFileName) + ", line " + std::to_string(number) + ": expected " + expected +
               ", got '" + line + "'";
      return false;
    }
  }
  if (format != kSettingsFormat) {
    *error = std::string(kSideFileName) + ": expected 'format = " + kSettingsFormat + "', got '" + format +
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
