// What was given to a front end for the caller of one stream, and is not written to the caller's socket yet.
//
// A front end keeps responses for a caller who reads slowly, without a limit. Backends of ours ask here how much that is,
// and do not go on with a stream before its caller has taken most of it: see ../proxy/stream_pace.h.
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

  // Of a front end that writes responses in their order, each in one piece: one was given to it; so many were written.
  void Add(uint64_t bytes);
  void Take(uint64_t count);
  // Of any other: what waits now, in bytes.
  void Set(uint64_t bytes);
  // So many bytes of a response were written, which is not whole so far.
  void NoteWritten(uint64_t bytes) { taken_.fetch_add(bytes, std::memory_order_relaxed); }
  // The caller has gone: nothing waits for it, nor will.
  void End();

  uint64_t waiting() const { return waiting_.load(std::memory_order_seq_cst); }
  // Changes whenever the caller has taken something.
  uint64_t taken() const { return taken_.load(std::memory_order_relaxed); }
  // Has an event be written to `event_fd`, once, when no more than `bytes` wait; -1: no more.
  void WakeBelow(uint64_t bytes, int event_fd);

 private:
  void Wake();

  std::atomic<uint64_t> waiting_{0};
  std::atomic<uint64_t> taken_{0};
  std::atomic<bool> is_watched_{false};
  std::mutex mutex_;  // guards everything below
  bool has_ended_ = false;
  std::deque<uint64_t> sizes_;
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
