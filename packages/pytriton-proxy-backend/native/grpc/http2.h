// One connection of HTTP/2, of either side: bytes between a socket and nghttp2, and bodies that are sent without a copy.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../guard/answers/stream_backlog.h"
#include "inference.h"
#include "loop.h"
#include "nghttp2.h"
#include "tls.h"

namespace pytriton::grpc {

using Fields = std::vector<std::pair<std::string, std::string>>;

// What HTTP/2 adds to the name and the value of each field where it counts them.
constexpr size_t kFieldOverhead = 32;

// Bytes to be sent, which may be shared with others that send the rest of them.
struct Piece {
  std::shared_ptr<char[]> owner;
  const char* data = nullptr;
  size_t size = 0;
};

// What is to be sent in one stream. Whoever uses it holds the lock of the connection.
struct Body {
  void Add(Chunk chunk);
  void Add(std::string_view text);
  void Add(std::string&& text);
  void Clear();
  // Tells the backlog of its stream, where that has one, how much waits.
  void Note();

  std::deque<Piece> pieces;
  size_t size = 0;
  bool is_ended = false;
  Fields trailers;  // sent behind the pieces where there are any
  std::shared_ptr<guard::StreamBacklog> backlog;
};

// What the other side sends in one stream, and what is sent to it. Called with the lock of the connection.
class Http2Stream {
 public:
  virtual ~Http2Stream() = default;
  virtual void OnField(std::string_view name, std::string_view value) = 0;
  virtual void OnHeadersEnd(bool is_end) = 0;
  virtual void OnData(const char* data, size_t size) = 0;
  virtual void OnEndOfStream() {}
  virtual void OnClosed() = 0;

 protected:
  friend struct Callbacks;
  Body body_;
};

class Http2Connection : public Pollable, public std::enable_shared_from_this<Http2Connection> {
 public:
  // Takes the descriptor. Call `Begin` next.
  Http2Connection(Loop* loop, int fd, const TlsContext* tls);
  ~Http2Connection() override;

  // Makes the session and waits for what comes; false where the system refuses. Whoever holds a lock in `Flush` and in
  // the functions of streams below holds this one.
  bool Begin(bool is_server, const std::vector<nghttp2::SettingsEntry>& settings, int32_t window);
  std::unique_lock<std::mutex> Lock() { return std::unique_lock<std::mutex>(mutex_); }

  // Sends what waits, as far as the socket takes it. Another thread that is just sending does it instead.
  void Flush(std::unique_lock<std::mutex>* lock);
  void Flush();

  // The end of the connection; from any thread. `OnClosed` follows in that of the loop.
  void Close();
  bool is_closed() const { return is_closed_; }
  Loop* loop() { return loop_; }

  void OnEvents(uint32_t events) override;

 protected:
  // When the other side was last heard of. The caller holds the lock.
  Clock::time_point heard() const { return heard_; }

  // With the lock: what has to happen without it waits for `AfterRead`.
  virtual void OnHeadersBegin(int32_t) {}
  virtual void OnGoAway() {}
  // Without the lock, in the thread of the loop.
  virtual void AfterRead() {}
  virtual void OnClosed() = 0;

  // The provider of a stream's body for nghttp2.
  static nghttp2::DataProvider Provider();
  static std::vector<nghttp2::NameValue> NameValues(const Fields& fields);

  const nghttp2::Api* const api_;
  nghttp2::Session* session_ = nullptr;
  std::mutex mutex_;
  std::atomic<bool> is_closed_{false};
  std::unordered_map<int32_t, std::shared_ptr<Http2Stream>> streams_;

 private:
  friend struct Callbacks;

  struct Segment {
    std::string text;  // of its own, where `piece.data` is null
    Piece piece;
  };

  void Read();
  void Fill();
  void AppendText(const char* data, size_t size);
  bool WriteOnce(std::unique_lock<std::mutex>* lock, bool* would_block);
  void FinishClose();

  Loop* const loop_;
  Socket socket_;
  uint64_t number_ = 0;  // at the loop
  std::deque<Segment> outbox_;
  size_t outbox_size_ = 0;
  size_t sent_of_front_ = 0;
  Clock::time_point heard_ = Clock::now();
  bool is_writing_ = false;
  bool waits_for_socket_ = false;
};

}  // namespace pytriton::grpc
