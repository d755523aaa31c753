// The responses of one stream that a front end has got and not yet written to its caller's socket.
//
// A front end keeps any number of responses for a caller who reads slowly. So our backends ask here how many bytes
// wait, and pause the stream until its caller has read most of them: see ../proxy/stream_pace.h.
//
// Everything is counted in the backend's bytes of responses, each of which counts at least `kLeast`.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

namespace pytriton::guard {

class StreamBacklog {
 public:
  // What a response of any size takes at least, with the server's objects and its framing.
  static constexpr uint64_t kLeast = 1024;

  // The front end, which writes responses in order, got another one.
  void Add(uint64_t bytes);
  // A front end that writes to the caller's socket has written `bytes` more, which complete `count` responses.
  void Write(uint64_t bytes, uint64_t count);
  // A front end that passes responses on to another one has passed on `count`; the other one reports by `Hold` how many
  // bytes it keeps for the caller.
  void Pass(uint64_t count);
  void Hold(uint64_t bytes);
  // Sets the socket, which is asked how many written bytes have left the system, until `End`. -1 for none.
  void SetSocket(int fd);
  // The caller has left, so nothing waits for it from now on.
  void End();

  uint64_t waiting() const {
    return given_.load(std::memory_order_seq_cst) + held_.load(std::memory_order_seq_cst);
  }
  // How much the caller has read since the beginning, without what still lies in the socket's buffers.
  uint64_t SeeTaken();
  // Lets an event be written to `event_fd`, once, when no more than `bytes` wait; -1 cancels this.
  void WakeBelow(uint64_t bytes, int event_fd);

 private:
  uint64_t Pop(uint64_t count);
  void Wake();

  std::atomic<uint64_t> given_{0};
  std::atomic<uint64_t> held_{0};
  std::atomic<bool> is_watched_{false};
  std::mutex mutex_;  // guards everything below
  bool has_ended_ = false;
  std::deque<uint64_t> sizes_;  // responses that their caller does not have completely
  uint64_t taken_ = 0;
  uint64_t of_front_ = 0;  // how much of it belongs to the first of `sizes_`
  uint64_t written_ = 0;   // bytes as they were written
  uint64_t seen_ = 0;      // the last result of `SeeTaken`
  int fd_ = -1;
  uint64_t below_ = 0;
  int event_fd_ = -1;
};

// A response that a backend is sending in this thread, with its size. Whoever takes it says to which stream it belongs.
class GivenResponse {
 public:
  static void Announce(uint64_t bytes, bool wants_stream);
  // Its size, for the first who asks; 0 if it was not announced.
  static uint64_t TakeBytes();
  static void Note(const std::shared_ptr<StreamBacklog>& stream);
  static std::shared_ptr<StreamBacklog> TakeStream();
};

}  // namespace pytriton::guard
