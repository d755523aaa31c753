// One HTTP/2 connection of either side: moves bytes between a socket and nghttp2, and sends bodies without copying
// them.
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

// What HTTP/2 adds to the lengths of name and value when it counts the size of a field.
constexpr size_t kFieldOverhead = 32;

// Bytes to be sent, whose owner may be shared with the pieces that follow.
struct Piece {
  std::shared_ptr<char[]> owner;
  const char* data = nullptr;
  size_t size = 0;
};

// What is to be sent in one stream. Guarded by the lock of the connection.
struct Body {
  void Add(Chunk chunk);
  void Add(std::string_view text);
  void Add(std::string&& text);
  void Clear();
  // How much memory it takes.
  size_t cost() const { return size + pieces.size() * (guard::StreamBacklog::kLeast / 2); }
  // Tells the backlog of the stream, if it has one, how much waits.
  void Note();

  std::deque<Piece> pieces;
  size_t size = 0;
  bool is_ended = false;
  Fields trailers;  // sent after the pieces, if there are any
  std::shared_ptr<guard::StreamBacklog> backlog;
};

// One stream: receives what the other side sends, and holds what is sent to it. Called with the lock of the connection.
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

  // Makes the session and waits for data; false if the system refuses. The lock in `Flush` and in the functions of
  // streams below is the lock of this connection.
  bool Begin(bool is_server, const std::vector<nghttp2::SettingsEntry>& settings, int32_t window);
  std::unique_lock<std::mutex> Lock() { return std::unique_lock<std::mutex>(mutex_); }

  // Sends what waits, as far as the socket takes it. If another thread is sending, that thread does it.
  void Flush(std::unique_lock<std::mutex>* lock);
  void Flush();

  // Ends the connection, from any thread. `OnClosed` follows in the thread of the loop.
  void Close();
  bool is_closed() const { return is_closed_; }
  Loop* loop() { return loop_; }

  void OnEvents(uint32_t events) override;

 protected:
  // When the other side last sent something. Needs the lock.
  Clock::time_point heard() const { return heard_; }

  // Called with the lock. What must be done without it waits for `AfterRead`.
  virtual void OnHeadersBegin(int32_t) {}
  virtual void OnGoAway() {}
  // Called without the lock, in the thread of the loop.
  virtual void AfterRead() {}
  virtual void OnClosed() = 0;

  // Provides the body of a stream to nghttp2.
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
    std::string text;  // bytes of its own, if `piece.data` is null
    Piece piece;
  };

  void Read();
  void Fill();
  void AppendText(const char* data, size_t size);
  bool WriteOnce(std::unique_lock<std::mutex>* lock, bool* would_block);
  void FinishClose();

  Loop* const loop_;
  Socket socket_;
  uint64_t number_ = 0;  // its number in the loop
  std::deque<Segment> outbox_;
  size_t outbox_size_ = 0;
  size_t sent_of_front_ = 0;
  Clock::time_point heard_ = Clock::now();
  bool is_writing_ = false;
  bool waits_for_socket_ = false;
};

}  // namespace pytriton::grpc
