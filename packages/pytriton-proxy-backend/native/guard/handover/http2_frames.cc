#include "http2_frames.h"

#include <algorithm>

namespace pytriton::guard {

namespace {

constexpr uint8_t kHeaders = 1;
constexpr uint8_t kSettings = 4;
constexpr uint8_t kGoAway = 7;

}  // namespace

void Http2Frames::Pass(const iovec* parts, size_t count, size_t size) {
  for (size_t i = 0; i < count && size > 0 && !is_other_; ++i) {
    const auto* data = static_cast<const uint8_t*>(parts[i].iov_base);
    size_t part = std::min(parts[i].iov_len, size);
    size -= part;
    while (part > 0 && !is_other_) {
      size_t used = 1;
      if (left_ > 0) {
        used = static_cast<size_t>(std::min<uint64_t>(part, left_));
        left_ -= used;
      } else {
        header_[header_size_++] = *data;
        if (header_size_ == header_.size()) EndHeader();
      }
      data += used;
      part -= used;
    }
  }
}

void Http2Frames::EndHeader() {
  header_size_ = 0;
  left_ = static_cast<uint64_t>(header_[0]) << 16 | static_cast<uint64_t>(header_[1]) << 8 | header_[2];
  const uint32_t stream = (static_cast<uint32_t>(header_[5]) << 24 | static_cast<uint32_t>(header_[6]) << 16 |
                           static_cast<uint32_t>(header_[7]) << 8 | header_[8]) &
                          kAnyStream;
  // Each side begins with its settings, so this is not HTTP/2.
  if (!is_http2_ && (header_[3] != kSettings || stream != 0)) is_other_ = true;
  is_http2_ = !is_other_;
  if (header_[3] == kHeaders) last_stream_ = std::max(last_stream_, stream);
}

std::array<uint8_t, 17> GoAway(uint32_t last_stream) {
  return {0,
          0,
          8,
          kGoAway,
          0,
          0,
          0,
          0,
          0,
          static_cast<uint8_t>(last_stream >> 24),
          static_cast<uint8_t>(last_stream >> 16),
          static_cast<uint8_t>(last_stream >> 8),
          static_cast<uint8_t>(last_stream),
          0,
          0,
          0,
          0};
}

}  // namespace pytriton::guard
