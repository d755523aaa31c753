// Whether the caller of a stream takes its responses. The guard of the process knows it, where there is one: it sees what
// its front ends have been given, and what they have written to the caller.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pytriton {

// Before a response is sent: how large it is, and whether `TakeStream` is asked for its stream after that.
void AnnounceResponse(uint64_t bytes, bool wants_stream);

// The stream that took the response which this thread has sent last, null where nobody knows. To be given to a StreamPace.
void* TakeStream();

// The responses that this thread sends while one of these lives go to the sockets of their callers together.
class SentTogether {
 public:
  SentTogether();
  ~SentTogether();
  SentTogether(const SentTogether&) = delete;
  SentTogether& operator=(const SentTogether&) = delete;
};

class StreamPace {
 public:
  // Takes over `stream`, which is not null.
  explicit StreamPace(void* stream) : stream_(stream) {}
  ~StreamPace();
  StreamPace(const StreamPace&) = delete;
  StreamPace& operator=(const StreamPace&) = delete;

  // What the caller of a stream that pauses has to take within the time in which it would be stalled else. A pause ends when
  // it has taken half of `most`: so none lasts longer than that time by as many times as this goes into that half.
  static uint64_t LeastTaken(uint64_t most) { return std::clamp<uint64_t>(most / 16, 1, 256 * 1024); }

  // Looks how much waits for the caller: above `most` bytes the stream pauses, until half of that is left. Then something
  // is written to `wake_fd`, an event. Returns whether it pauses.
  bool Look(uint64_t most, int wake_fd, uint64_t now_ns);
  // For how long the caller of a stream that pauses has not taken enough.
  uint64_t stalled_ns(uint64_t now_ns) const { return is_paused_ && now_ns > since_ns_ ? now_ns - since_ns_ : 0; }
  bool is_paused() const { return is_paused_; }
  // The stream has ended, or its caller has left: it does not pause any more.
  void End();

  bool is_told = false;  // whether the worker knows that it pauses

 private:
  void* const stream_;
  bool is_paused_ = false;
  uint64_t taken_ = 0;     // of the stream, when it began to pause or its caller had taken enough
  uint64_t since_ns_ = 0;  // when that was
};

}  // namespace pytriton
