// Whether the caller of a request wants it traced, which its header `traceparent` says.
//
// Bug: tritonserver traces each request with that header, whatever its flag says. So if the flag says no, the server
// does not get to see the header, and traces as many of these requests as of those without it.
// Until: no version of tritonserver is known to do better.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string_view>

namespace pytriton::guard {

constexpr std::string_view kTraceHeader = "traceparent";

// Whether tritonserver makes spans for OpenTelemetry; only options at its start can say so.
inline bool MakesSpans(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strstr(argv[i], "mode=opentelemetry") != nullptr) return true;
  }
  return false;
}

// Whether a value of the header has the flag off: "00-<32 digits>-<16 digits>-00".
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
