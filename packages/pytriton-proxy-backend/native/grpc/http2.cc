#include "http2.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pytriton::grpc {

namespace {

// While so much waits for the socket, nothing more is taken from nghttp2, where it can still be cancelled.
constexpr size_t kMostOutbox = 1 << 20;
// A smaller piece is copied next to the other bytes, which costs less than a part of its own.
constexpr size_t kSmallPiece = 1024;
constexpr size_t kMostText = 16 * 1024;
constexpr size_t kReadSize = 256 * 1024;
// How often one connection is read before other ones have their turn.
constexpr int kMostReads = 8;
constexpr size_t kMostFrame = 1 << 20;
constexpr uint64_t kResetBurst = 100'000;
constexpr uint64_t kResetsPerSecond = 10'000;
// After this silence the system probes whether the peer still exists, and so finds a dead one.
constexpr int kKeepaliveIdleSeconds = 60;

Http2Connection* Of(void* user) { return static_cast<Http2Connection*>(user); }

}  // namespace

void Body::Add(Chunk chunk) {
  if (chunk.size == 0) return;
  Piece piece;
  piece.size = chunk.size;
  if (chunk.held == nullptr) {
    piece.owner = std::shared_ptr<char[]>(std::move(chunk.data));
  } else {
    piece.owner = std::shared_ptr<char[]>(chunk.data.release(),
                                          [held = std::move(chunk.held)](const char* data) { delete[] data; });
  }
  piece.data = piece.owner.get();
  size += piece.size;
  pieces.push_back(std::move(piece));
}

void Body::Clear() {
  pieces.clear();
  size = 0;
  Note();
}

void Body::Note() {
  if (backlog != nullptr) backlog->Hold(cost());
}

void Body::Add(std::string_view text) {
  Chunk chunk;
  chunk.data = std::make_unique<char[]>(text.size());
  chunk.size = text.size();
  std::memcpy(chunk.data.get(), text.data(), text.size());
  Add(std::move(chunk));
}

void Body::Add(std::string&& text) {
  if (text.empty()) return;
  const auto owner = std::make_shared<std::string>(std::move(text));
  size += owner->size();
  pieces.push_back({std::shared_ptr<char[]>(owner, owner->data()), owner->data(), owner->size()});
}

// The functions that nghttp2 calls. Their user pointer is the connection.
struct Callbacks {
  static int OnBeginHeaders(nghttp2::Session*, const nghttp2::Frame* frame, void* user) {
    Of(user)->OnHeadersBegin(frame->header.stream_id);
    return 0;
  }

  // The stream is valid until the next call of a function of nghttp2 that receives, because only `OnStreamClose`
  // removes streams.
  static Http2Stream* Find(void* user, int32_t number) {
    const auto& streams = Of(user)->streams_;
    const auto found = streams.find(number);
    return found == streams.end() ? nullptr : found->second.get();
  }

  static int OnHeader(nghttp2::Session*, const nghttp2::Frame* frame, const uint8_t* name, size_t name_size,
                      const uint8_t* value, size_t value_size, uint8_t, void* user) {
    if (Http2Stream* const stream = Find(user, frame->header.stream_id)) {
      stream->OnField({reinterpret_cast<const char*>(name), name_size},
                      {reinterpret_cast<const char*>(value), value_size});
    }
    return 0;
  }

  static int OnFrame(nghttp2::Session*, const nghttp2::Frame* frame, void* user) {
    const auto& header = frame->header;
    const bool is_end = (header.flags & nghttp2::kEndStream) != 0;
    if (header.type == nghttp2::kGoAway) Of(user)->OnGoAway();
    Http2Stream* const stream = Find(user, header.stream_id);
    if (stream == nullptr) return 0;
    if (header.type == nghttp2::kHeaders) {
      stream->OnHeadersEnd(is_end);
    } else if (header.type == nghttp2::kData && is_end) {
      stream->OnEndOfStream();
    }
    return 0;
  }

  static int OnDataChunk(nghttp2::Session*, uint8_t, int32_t number, const uint8_t* data, size_t size, void* user) {
    if (Http2Stream* const stream = Find(user, number)) stream->OnData(reinterpret_cast<const char*>(data), size);
    return 0;
  }

  static int OnStreamClose(nghttp2::Session*, int32_t number, uint32_t, void* user) {
    const auto closed = Of(user)->streams_.extract(number);
    if (!closed.empty()) closed.mapped()->OnClosed();
    return 0;
  }

  static ssize_t ReadBody(nghttp2::Session* session, int32_t number, uint8_t*, size_t length, uint32_t* flags,
                          nghttp2::DataSource*, void* user) {
    Http2Stream* const stream = Find(user, number);
    if (stream == nullptr) return nghttp2::kErrorTemporaryCallback;
    Body* const body = &stream->body_;
    if (body->size == 0 && !body->is_ended) return nghttp2::kErrorDeferred;
    const size_t size = std::min(length, body->size);
    *flags |= nghttp2::kDataNoCopy;
    if (size == body->size && body->is_ended) {
      *flags |= nghttp2::kDataEof;
      if (!body->trailers.empty()) {
        *flags |= nghttp2::kDataNoEndStream;
        const auto trailers = Http2Connection::NameValues(body->trailers);
        if (Of(user)->api_->submit_trailer(session, number, trailers.data(), trailers.size()) != 0) {
          return nghttp2::kErrorTemporaryCallback;
        }
      }
    }
    return static_cast<ssize_t>(size);
  }

  static int SendBody(nghttp2::Session*, nghttp2::Frame* frame, const uint8_t* header, size_t length,
                      nghttp2::DataSource*, void* user) {
    Http2Connection* const connection = Of(user);
    Http2Stream* const stream = Find(user, frame->header.stream_id);
    if (stream == nullptr || stream->body_.size < length) return nghttp2::kErrorTemporaryCallback;
    Body* const body = &stream->body_;
    connection->AppendText(reinterpret_cast<const char*>(header), 9);
    body->size -= length;
    while (length > 0) {
      Piece& front = body->pieces.front();
      const size_t size = std::min(length, front.size);
      if (size <= kSmallPiece) {
        connection->AppendText(front.data, size);
      } else {
        connection->outbox_.push_back({{}, {front.owner, front.data, size}});
        connection->outbox_size_ += size;
      }
      length -= size;
      front.data += size;
      front.size -= size;
      if (front.size == 0) body->pieces.pop_front();
    }
    body->Note();
    return 0;
  }

  static ssize_t BodyLength(nghttp2::Session*, uint8_t, int32_t, int32_t session_window, int32_t stream_window,
                            uint32_t max_frame_size, void*) {
    const auto window = static_cast<size_t>(std::max(1, std::min(session_window, stream_window)));
    return static_cast<ssize_t>(std::min({window, static_cast<size_t>(max_frame_size), kMostFrame}));
  }
};

Http2Connection::Http2Connection(Loop* loop, int fd, const TlsContext* tls)
    : api_(nghttp2::Get()), loop_(loop), socket_(fd, tls) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepaliveIdleSeconds, sizeof(kKeepaliveIdleSeconds));
}

Http2Connection::~Http2Connection() {
  if (session_ != nullptr) api_->del(session_);
}

bool Http2Connection::Begin(bool is_server, const std::vector<nghttp2::SettingsEntry>& settings, int32_t window) {
  nghttp2::Callbacks* callbacks = nullptr;
  nghttp2::Option* option = nullptr;
  if (api_->callbacks_new(&callbacks) != 0) return false;
  if (api_->option_new(&option) != 0) {
    api_->callbacks_del(callbacks);
    return false;
  }
  api_->callbacks_set_on_begin_headers_callback(callbacks, Callbacks::OnBeginHeaders);
  api_->callbacks_set_on_header_callback(callbacks, Callbacks::OnHeader);
  api_->callbacks_set_on_frame_recv_callback(callbacks, Callbacks::OnFrame);
  api_->callbacks_set_on_data_chunk_recv_callback(callbacks, Callbacks::OnDataChunk);
  api_->callbacks_set_on_stream_close_callback(callbacks, Callbacks::OnStreamClose);
  api_->callbacks_set_send_data_callback(callbacks, Callbacks::SendBody);
  api_->callbacks_set_data_source_read_length_callback(callbacks, Callbacks::BodyLength);
  // nghttp2 keeps closed streams for priorities, which are not used here.
  api_->option_set_no_closed_streams(option, 1);
  // A web server that gives up the calls of its own callers may reset any number of streams. By default, the library
  // ends a connection with more than 33 resets a second.
  if (api_->option_set_stream_reset_rate_limit != nullptr) {
    api_->option_set_stream_reset_rate_limit(option, kResetBurst, kResetsPerSecond);
  }
  const int error = is_server ? api_->server_new2(&session_, callbacks, this, option)
                              : api_->client_new2(&session_, callbacks, this, option);
  api_->option_del(option);
  api_->callbacks_del(callbacks);
  if (error != 0) return false;
  auto lock = Lock();
  if (api_->submit_settings(session_, 0, settings.data(), settings.size()) != 0 ||
      api_->set_local_window_size(session_, 0, 0, window) != 0) {
    return false;
  }
  number_ = loop_->Add(socket_.fd(), EPOLLIN | EPOLLRDHUP, shared_from_this());
  if (number_ == 0) return false;
  Flush(&lock);
  return true;
}

nghttp2::DataProvider Http2Connection::Provider() {
  nghttp2::DataProvider provider{};
  provider.read = Callbacks::ReadBody;
  return provider;
}

std::vector<nghttp2::NameValue> Http2Connection::NameValues(const Fields& fields) {
  std::vector<nghttp2::NameValue> values;
  values.reserve(fields.size());
  for (const auto& [name, value] : fields) {
    values.push_back({reinterpret_cast<const uint8_t*>(name.data()), reinterpret_cast<const uint8_t*>(value.data()),
                      name.size(), value.size(), 0});
  }
  return values;
}

// --- reading ---------------------------------------------------------------------------------------------------------

void Http2Connection::OnEvents(uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    auto lock = Lock();
    if (waits_for_socket_ && !is_closed_) {
      waits_for_socket_ = false;
      loop_->Change(number_, socket_.fd(), EPOLLIN | EPOLLRDHUP);
      Flush(&lock);
    }
  }
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) Read();
  FinishClose();
}

void Http2Connection::Read() {
  // Each loop's thread has one buffer.
  static thread_local std::unique_ptr<uint8_t[]> buffer;
  if (buffer == nullptr) buffer.reset(new uint8_t[kReadSize]);
  for (int i = 0; i < kMostReads || socket_.has_pending(); ++i) {
    if (is_closed_) return;
    const ssize_t size = socket_.Read(buffer.get(), kReadSize);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    auto lock = Lock();
    if (size <= 0) {
      is_closed_ = true;
      return;
    }
    heard_ = Clock::now();
    const ssize_t used = api_->mem_recv(session_, buffer.get(), static_cast<size_t>(size));
    lock.unlock();
    AfterRead();
    lock.lock();
    // This also sends what nghttp2 has to say about an error.
    Flush(&lock);
    if (used != size || (api_->want_read(session_) == 0 && api_->want_write(session_) == 0)) {
      is_closed_ = true;
      return;
    }
    if (static_cast<size_t>(size) < kReadSize && !socket_.has_pending()) return;
  }
}

// --- writing ---------------------------------------------------------------------------------------------------------

void Http2Connection::AppendText(const char* data, size_t size) {
  if (outbox_.empty() || outbox_.back().piece.data != nullptr || outbox_.back().text.size() > kMostText) {
    outbox_.emplace_back();
  }
  outbox_.back().text.append(data, size);
  outbox_size_ += size;
}

void Http2Connection::Fill() {
  while (outbox_size_ < kMostOutbox) {
    const uint8_t* data = nullptr;
    const ssize_t size = api_->mem_send(session_, &data);
    if (size < 0) is_closed_ = true;
    if (size <= 0) return;
    AppendText(reinterpret_cast<const char*>(data), static_cast<size_t>(size));
  }
}

// Writes the outbox once. Returns false if that ends the connection. Other threads may have the lock meanwhile, but
// they leave the outbox to this one.
bool Http2Connection::WriteOnce(std::unique_lock<std::mutex>* lock, bool* would_block) {
  constexpr int kMostParts = 64;
  iovec parts[kMostParts];
  int count = 0;
  for (const Segment& segment : outbox_) {
    if (count == kMostParts) break;
    const bool is_text = segment.piece.data == nullptr;
    parts[count].iov_base = const_cast<char*>(is_text ? segment.text.data() : segment.piece.data);
    parts[count].iov_len = is_text ? segment.text.size() : segment.piece.size;
    ++count;
  }
  parts[0].iov_base = static_cast<char*>(parts[0].iov_base) + sent_of_front_;
  parts[0].iov_len -= sent_of_front_;
  lock->unlock();
  ssize_t size = socket_.Write(parts, count);
  const int error = errno;
  lock->lock();
  if (size < 0) {
    *would_block = error == EAGAIN || error == EWOULDBLOCK;
    return *would_block || error == EINTR;
  }
  outbox_size_ -= static_cast<size_t>(size);
  sent_of_front_ += static_cast<size_t>(size);
  while (!outbox_.empty()) {
    const Segment& front = outbox_.front();
    const size_t whole = front.piece.data == nullptr ? front.text.size() : front.piece.size;
    if (sent_of_front_ < whole) break;
    sent_of_front_ -= whole;
    outbox_.pop_front();
  }
  return true;
}

void Http2Connection::Flush() {
  auto lock = Lock();
  Flush(&lock);
}

void Http2Connection::Flush(std::unique_lock<std::mutex>* lock) {
  if (is_writing_ || waits_for_socket_ || is_closed_) return;
  is_writing_ = true;
  while (!is_closed_) {
    Fill();
    if (outbox_.empty()) break;
    bool would_block = false;
    if (!WriteOnce(lock, &would_block)) {
      is_closed_ = true;
    } else if (would_block) {
      waits_for_socket_ = true;
      loop_->Change(number_, socket_.fd(), EPOLLIN | EPOLLRDHUP | EPOLLOUT);
      break;
    }
  }
  is_writing_ = false;
  if (is_closed_) {
    // The thread of the loop finishes the end of the connection.
    loop_->Post([self = shared_from_this()] { self->FinishClose(); });
  }
}

// --- the end ---------------------------------------------------------------------------------------------------------

void Http2Connection::Close() {
  {
    const auto lock = Lock();
    is_closed_ = true;
  }
  loop_->Post([self = shared_from_this()] { self->FinishClose(); });
}

void Http2Connection::FinishClose() {
  uint64_t number = 0;
  std::deque<Segment> unsent;  // destroyed after the lock is released, because that calls Triton
  {
    const auto lock = Lock();
    // A thread that is writing calls this again when it is done.
    if (!is_closed_ || is_writing_ || number_ == 0) return;
    number = std::exchange(number_, 0);
    outbox_.swap(unsent);
  }
  socket_.Shutdown();
  loop_->Remove(number, socket_.fd());
  OnClosed();
}

}  // namespace pytriton::grpc
