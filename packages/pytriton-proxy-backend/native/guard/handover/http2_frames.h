// Where the frames of one direction of an HTTP/2 connection begin, and the connection's goodbye. No I/O.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace pytriton::guard {

class Http2Frames {
 public:
  // `preface` is 24 for the client's direction.
  explicit Http2Frames(size_t preface = 0) : left_(preface) {}

  // Follows bytes that were sent or received.
  void Pass(const iovec* parts, size_t count, size_t size);

  // Whether this is HTTP/2, and what has passed so far ends with a frame.
  bool is_between_frames() const { return is_http2_ && left_ == 0 && header_size_ == 0; }
  // The last request that has begun; 0 before the first.
  uint32_t last_stream() const { return last_stream_; }

 private:
  void EndHeader();

  std::array<uint8_t, 9> header_{};
  size_t header_size_ = 0;
  uint64_t left_ = 0;  // bytes left of the frame, or of the preface
  bool is_http2_ = false;
  bool is_other_ = false;  // TLS, for example
  uint32_t last_stream_ = 0;
};

constexpr uint32_t kAnyStream = 0x7fffffff;

// Makes a GOAWAY frame: the caller must open another connection for its next request. Requests after `last_stream` were
// not served.
std::array<uint8_t, 17> GoAway(uint32_t last_stream);

}  // namespace pytriton::guard
