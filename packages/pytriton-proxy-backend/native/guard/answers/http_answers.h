// Follows what is written to one HTTP/1.1 connection, to know where a response begins and where it ends. The front end
// (libevhtp 1.2.18) hands over in one piece what has come together, which may be the responses of several requests.
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
  // Whether the next byte begins a response. False for ever where what was written is no response: nothing is known of what
  // follows.
  bool is_at_begin() const { return state_ == State::kHead && line_.empty(); }
  bool is_lost() const { return state_ == State::kLost; }

  // Reads on, up to the end of a response; returns how many of the bytes it took. "HTTP/1.1 100 Continue" is one.
  size_t Feed(std::string_view text);
  // As before. Of `parts` it reads `most` bytes, which are no more than they have.
  size_t Feed(const iovec* parts, size_t most);

  // How many chunks have passed, of all responses together.
  uint64_t chunks() const { return chunks_; }

 private:
  enum class State { kHead, kBody, kChunkSize, kChunk, kTrailers, kLost };

  size_t FeedLine(std::string_view text);
  void EndHead();
  void Lose();

  State state_ = State::kHead;
  std::string line_;   // the head, or a line of chunks, as far as it has come
  uint64_t left_ = 0;  // of the body, or of the chunk and what ends its line
  uint64_t chunks_ = 0;
};

// "200" and what follows, in part, of bytes that begin a response; empty where they begin none, or one that announces another
// (100 and the like).
std::string StatusIn(const iovec* parts, int count);

// The first `most` bytes of parts.
std::vector<iovec> FirstOf(const iovec* parts, int count, size_t most);
size_t SizeOf(const iovec* parts, int count);

}  // namespace pytriton::guard
