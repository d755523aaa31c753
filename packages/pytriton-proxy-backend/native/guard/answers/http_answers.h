// Follows what is written to one HTTP/1.1 connection, to find where each response begins and ends. The front end
// (libevhtp 1.2.18) writes in one piece what has accumulated, which may be the responses to several requests.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pytriton::guard {

class HttpAnswers {
 public:
  // Whether the next byte begins a response. If something was written that is no response, this stays false, because
  // the rest cannot be followed.
  bool is_at_begin() const { return state_ == State::kHead && line_.empty(); }
  bool is_lost() const { return state_ == State::kLost; }

  // Reads up to the end of a response, and returns how many bytes it took. "HTTP/1.1 100 Continue" counts as a
  // response.
  size_t Feed(std::string_view text);
  // The same for the first `most` bytes of `parts`, which must have as many.
  size_t Feed(const iovec* parts, size_t most);

  // How many chunks of all responses have passed.
  uint64_t chunks() const { return chunks_; }

 private:
  enum class State { kHead, kBody, kChunkSize, kChunk, kTrailers, kLost };

  size_t FeedLine(std::string_view text);
  void EndHead();
  void Lose();

  State state_ = State::kHead;
  std::string line_;   // what has come of the head, or of a line of chunks
  uint64_t left_ = 0;  // bytes left of the body, or of the chunk and its line end
  uint64_t chunks_ = 0;
};

// The status and what follows it, in part, if these bytes begin a final response; "" otherwise, such as for 100.
std::string StatusIn(const iovec* parts, int count);

// The first `most` bytes of parts.
std::vector<iovec> FirstOf(const iovec* parts, int count, size_t most);
size_t SizeOf(const iovec* parts, int count);

}  // namespace pytriton::guard
