// gRPC's framing of messages in a body: five bytes in front of each, compressed or not; and what stands in its headers.
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

// The five bytes in front of a message that is not compressed.
void WritePrefix(char* prefix, size_t size);

// Takes messages out of a body as it comes. Memory grows with what has come, not with what was announced.
class MessageReader {
 public:
  enum class Result { kNeedsMore, kMessage, kTooLarge, kNoMemory, kNoneLeft };

  // Messages of more bytes than `limit` are refused when their size is read.
  explicit MessageReader(size_t limit) : limit_(limit) {}

  // Goes on with what has come; `*used` is how much of it was taken. After kMessage: call `Take`, then go on. What the
  // message takes is counted in `held` before, where that is not null; kNoneLeft where the limit leaves none.
  Result Feed(const char* data, size_t size, size_t* used, Held* held);
  Chunk Take(bool* is_compressed);
  // Whether the body has ended within a message.
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

// Why a request is refused for which the limit of all in flight leaves no memory.
Status NoneLeft();

// Unpacks a message; `encoding` is gzip or deflate. Status kOk, or why not. What it takes is counted in `held`.
Status Decompress(std::string_view encoding, size_t limit, Chunk* message, Held* held);

// How long a call may take, of the header grpc-timeout; nothing where it cannot be read.
std::optional<std::chrono::nanoseconds> ParseTimeout(std::string_view text);

// The text of a status as the trailer grpc-message has it.
std::string PercentEncode(std::string_view text);

}  // namespace pytriton::grpc
