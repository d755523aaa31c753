#include "cors.h"

#include <algorithm>

namespace pytriton::guard {

namespace {

// Without these headers, scripts do not see where the JSON of a binary answer ends, and how it is compressed.
constexpr std::string_view kExposed = "Content-Encoding, Inference-Header-Content-Length";
// For so many seconds a browser need not ask again.
constexpr std::string_view kMaxAge = "600";
constexpr size_t kMostWanted = 1024;

bool IsListOfNames(std::string_view text) {
  return text.size() <= kMostWanted && std::all_of(text.begin(), text.end(), [](unsigned char byte) {
           return (byte >= '0' && byte <= '9') || ((byte | 0x20) >= 'a' && (byte | 0x20) <= 'z') || byte == '-' ||
                  byte == '_' || byte == '.' || byte == ',' || byte == ' ';
         });
}

}  // namespace

CorsOrigins::CorsOrigins(std::string_view list) {
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(' ', begin), list.size());
    const std::string_view origin = list.substr(begin, end - begin);
    if (origin == "*") {
      any_ = true;
    } else if (!origin.empty()) {
      origins_.emplace_back(origin);
    }
    begin = end + 1;
  }
}

bool CorsOrigins::Allows(std::string_view origin) const {
  return !origin.empty() && (any_ || std::find(origins_.begin(), origins_.end(), origin) != origins_.end());
}

std::string CorsOrigins::Headers(std::string_view origin) const {
  // A cache between them must know that the answer is for this origin alone.
  std::string lines = any_ ? "" : "Vary: Origin\r\n";
  if (!Allows(origin)) return lines;
  lines.append("Access-Control-Allow-Origin: ").append(any_ ? "*" : origin).append("\r\n");
  return lines.append("Access-Control-Expose-Headers: ").append(kExposed).append("\r\n");
}

std::string CorsOrigins::PreflightHeaders(std::string_view origin, std::string_view wanted) const {
  std::string lines = Headers(origin);
  if (!Allows(origin)) return lines;
  lines.append("Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\nAccess-Control-Max-Age: ").append(kMaxAge);
  lines.append("\r\n");
  // A page that may send requests may send any headers; the server decides which it reads.
  if (!wanted.empty() && IsListOfNames(wanted)) lines.append("Access-Control-Allow-Headers: ").append(wanted).append("\r\n");
  return lines;
}

}  // namespace pytriton::guard
