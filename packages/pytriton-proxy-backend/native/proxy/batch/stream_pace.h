// Whether the caller of a stream reads its responses. The guard, if the process has one, knows this: it sees what the
// front ends were given, and what they have written to the caller.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pytriton {

// To be called before a response is sent: says how large it is, and whether `TakeStream` will be called for it.
void AnnounceResponse(uint64_t bytes, bool wants_stream);

// Returns the stream of the response that this thread has sent last, for a StreamPace; null if it is unknown.
void* TakeStream();

// While an object of this class lives, the responses that this thread sends are held and then written to their callers
// together.
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

  // How many bytes the caller of a paused stream must read within the stall timeout. A pause ends when it has read half
  // of `most`, so it lasts at most as many timeouts as this fits into that half.
  static uint64_t LeastTaken(uint64_t most) { return std::clamp<uint64_t>(most / 16, 1, 256 * 1024); }

  // Checks how much waits for the caller. Above `most` bytes the stream pauses until half of that is left; then
  // something is written to `wake_fd`, an event. Returns whether it pauses.
  bool Look(uint64_t most, int wake_fd, uint64_t now_ns);
  // For how long the caller of a paused stream has not read enough.
  uint64_t stalled_ns(uint64_t now_ns) const { return is_paused_ && now_ns > since_ns_ ? now_ns - since_ns_ : 0; }
  bool is_paused() const { return is_paused_; }
  // The stream has ended or its caller has left, so it does not pause any more.
  void End();

  bool is_told = false;  // whether the worker was told that it pauses

 private:
  void* const stream_;
  bool is_paused_ = false;
  uint64_t taken_ = 0;     // how much the caller had read when the pause began, or when it had read enough
  uint64_t since_ns_ = 0;  // when that was
};

}  // namespace pytriton
