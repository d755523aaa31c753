#include "json_scan.h"

#include <cstring>

namespace pytriton::guard {

bool JsonScan::Feed(const char* data, size_t size, uint64_t max_depth) {
  const char* const end = data + size;
  if (in_string_) data = SkipString(data, end);
  while (data < end) {
    switch (*data++) {
      case '[':
      case '{':
        ++values_;
        if (++depth_ > max_depth) return false;
        break;
      case ']':
      case '}':
        if (depth_ > 0) --depth_;
        break;
      case ':':
        ++members_;
        ++values_;
        break;
      case ',':
        ++values_;
        break;
      case '"':
        in_string_ = true;
        data = SkipString(data, end);
        break;
      default:
        break;
    }
  }
  return true;
}

// Strings are what is long in JSON (images in base64), so they are passed over with memchr. `quote` is looked for again
// only behind the last one found, or a text of many escapes would be searched as often as it has some.
const char* JsonScan::SkipString(const char* data, const char* end) {
  if (escaped_ && data < end) {
    escaped_ = false;
    ++data;
  }
  const char* quote = data;
  while (data < end) {
    if (data >= quote) {
      quote = static_cast<const char*>(std::memchr(data, '"', static_cast<size_t>(end - data)));
      if (quote == nullptr) quote = end;
    }
    const auto* escape = static_cast<const char*>(std::memchr(data, '\\', static_cast<size_t>(quote - data)));
    if (escape == nullptr) {
      if (quote == end) return end;
      in_string_ = false;
      return quote + 1;
    }
    if (escape + 1 == end) {
      escaped_ = true;
      return end;
    }
    data = escape + 2;
    if (data > quote) quote = data;
  }
  return end;
}

}  // namespace pytriton::guard
