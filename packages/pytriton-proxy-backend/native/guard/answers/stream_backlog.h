// What was given to a front end for the caller of one stream, and is not written to the caller's socket yet.
//
// A front end keeps responses for a caller who reads slowly, without a limit. Backends of ours ask here how much that is,
// and do not go on with a stream before its caller has taken most of it: see ../proxy/stream_pace.h.
//
// All is counted in bytes of responses as a backend gives them, each with `kLeast` at least.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

namespace pytriton::guard {

class StreamBacklog {
 public:
  // A response, of whatever size, takes at least so much: objects of the server, and what is around it on the wire.
  static constexpr uint64_t kLeast = 1024;

  // A response was given to the front end, which writes them in their order.
  void Add(uint64_t bytes);
  // A front end that writes to the caller's socket has written `bytes` more, which complete `count` responses.
  void Write(uint64_t bytes, uint64_t count);
  // A front end that hands responses on to another has handed on `count`; the other reports by `Hold` how many bytes it
  // keeps for the caller.
  void Pass(uint64_t count);
  void Hold(uint64_t bytes);
  // The socket, by which is seen what of the written bytes has left the system; until `End`. -1: nobody's.
  void SetSocket(int fd);
  // The caller has gone: nothing waits for it, nor will.
  void End();

  uint64_t waiting() const {
    return given_.load(std::memory_order_seq_cst) + held_.load(std::memory_order_seq_cst);
  }
  // How much the caller has taken since the begin. What is in the buffers of the system's socket is not among it.
  uint64_t SeeTaken();
  // Has an event be written to `event_fd`, once, when no more than `bytes` wait; -1: no more.
  void WakeBelow(uint64_t bytes, int event_fd);

 private:
  uint64_t Pop(uint64_t count);
  void Wake();

  std::atomic<uint64_t> given_{0};
  std::atomic<uint64_t> held_{0};
  std::atomic<bool> is_watched_{false};
  std::mutex mutex_;  // guards everything below
  bool has_ended_ = false;
  std::deque<uint64_t> sizes_;  // of what was given and is not whole with the caller
  uint64_t taken_ = 0;
  uint64_t of_front_ = 0;  // how much of the first of `sizes_` is among it
  uint64_t written_ = 0;   // bytes, as they were written
  uint64_t seen_ = 0;      // what `SeeTaken` has said
  int fd_ = -1;
  uint64_t below_ = 0;
  int event_fd_ = -1;
};

// A backend has said that it sends a response in this thread now, and how large it is. Whoever takes it says which stream
// that belongs to.
class GivenResponse {
 public:
  static void Announce(uint64_t bytes, bool wants_stream);
  // How large it is; 0 where it was not announced. For the first who asks.
  static uint64_t TakeBytes();
  static void Note(const std::shared_ptr<StreamBacklog>& stream);
  static std::shared_ptr<StreamBacklog> TakeStream();
};

}  // namespace pytriton::guard
