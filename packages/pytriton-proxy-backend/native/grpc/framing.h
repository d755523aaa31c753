// gRPC's framing of messages in a body (five bytes before each message, which may be compressed), and the values of its
// headers.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "inference.h"
#include "memory.h"

namespace pytriton::grpc {

constexpr size_t kPrefixSize = 5;

// Writes the five bytes before a message that is not compressed.
void WritePrefix(char* prefix, size_t size);

// Takes messages out of a body as it arrives. Memory grows with what has arrived, not with what was announced.
class MessageReader {
 public:
  enum class Result { kNeedsMore, kMessage, kTooLarge, kNoMemory, kNoneLeft };

  // A message of more than `limit` bytes is refused when its size is read.
  explicit MessageReader(size_t limit) : limit_(limit) {}

  // Reads on; `*used` is set to how many bytes were taken. After kMessage, call `Take`, then go on. If `held` is not
  // null, the message's memory is counted there first; kNoneLeft means that the limit leaves none.
  Result Feed(const char* data, size_t size, size_t* used, Held* held);
  Chunk Take(bool* is_compressed);
  // Whether a message is incomplete.
  bool is_inside() const { return prefix_size_ > 0; }
  size_t announced() const { return message_size_; }

 private:
  size_t limit_;
  char prefix_[kPrefixSize];
  size_t prefix_size_ = 0;
  size_t message_size_ = 0;
  size_t received_ = 0;
  size_t capacity_ = 0;
  std::unique_ptr<char[]> message_;
};

// The status of a request that is refused because the limit of all requests in flight leaves no memory.
Status NoneLeft();

// Decompresses a message; `encoding` is gzip or deflate. Returns kOk, or what is wrong. Its memory is counted in
// `held`.
Status Decompress(std::string_view encoding, size_t limit, Chunk* message, Held* held);

// Reads the header grpc-timeout, the time that a call may take; empty if it cannot be read.
std::optional<std::chrono::nanoseconds> ParseTimeout(std::string_view text);

// Encodes the text of a status for the trailer grpc-message.
std::string PercentEncode(std::string_view text);
std::string PercentDecode(std::string_view text);

}  // namespace pytriton::grpc
