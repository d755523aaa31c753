// Whether the caller of a request wants it traced, as it says in the header `traceparent`.
//
// Bug: tritonserver traces each request with that header, whatever its flag says. So where the flag says no, the server is not
// to see the header, and traces as many of such requests as of those that come without.
// Until: no version of tritonserver is known to do better.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string_view>

namespace pytriton::guard {

constexpr std::string_view kTraceHeader = "traceparent";

// Whether tritonserver is told to make spans for OpenTelemetry, with options that it takes at its start alone.
inline bool MakesSpans(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strstr(argv[i], "mode=opentelemetry") != nullptr) return true;
  }
  return false;
}

// Whether a value of the header has the flag that is off: "00-<32 digits>-<16 digits>-00".
inline bool IsUnsampled(std::string_view value) {
  constexpr size_t kTrace = 3, kSpan = 36, kFlags = 53, kSize = 55;
  while (!value.empty() && (value.front() == ' ' || value.front() == '\t')) value.remove_prefix(1);
  while (!value.empty() && (value.back() == ' ' || value.back() == '\t')) value.remove_suffix(1);
  if (value.size() < kSize || (value.size() > kSize && value[kSize] != '-')) return false;
  if (value[kTrace - 1] != '-' || value[kSpan - 1] != '-' || value[kFlags - 1] != '-') return false;
  const char flags[] = {value[kFlags], value[kFlags + 1], '\0'};
  char* end = nullptr;
  const unsigned long bits = std::strtoul(flags, &end, 16);
  return end == flags + 2 && (bits & 1) == 0;
}

}  // namespace pytriton::guard
