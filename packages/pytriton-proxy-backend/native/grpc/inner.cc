#include "inner.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "framing.h"

namespace pytriton::grpc {

namespace {

// The streams of an HTTP/2 connection have every other number of 31 bits; a new connection is opened before they run
// out.
constexpr int32_t kMostStream = 0x3fffffff;
constexpr int32_t kWindow = 0x7fffffff;
constexpr int kConnectTimeoutMs = 10'000;
// Up to this size of header fields gRPC accepts every call; above it refuses some, and above twice the size all.
constexpr size_t kMostFieldsSize = 8 * 1024;

std::string NameOf(int fd, bool is_peer) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  const auto ask = is_peer ? getpeername : getsockname;
  if (ask(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  // Only the ports are compared, because the ends may see different scopes and flows of an IPv6 address.
  uint16_t port = 0;
  in6_addr host{};
  if (address.ss_family == AF_INET) {
    const auto* four = reinterpret_cast<const sockaddr_in*>(&address);
    port = four->sin_port;
    host.s6_addr[10] = host.s6_addr[11] = 0xff;
    std::memcpy(&host.s6_addr[12], &four->sin_addr, 4);
  } else if (address.ss_family == AF_INET6) {
    const auto* six = reinterpret_cast<const sockaddr_in6*>(&address);
    port = six->sin6_port;
    host = six->sin6_addr;
  } else {
    return "";
  }
  return std::string(reinterpret_cast<const char*>(&host), sizeof(host)) +
         std::string(reinterpret_cast<const char*>(&port), sizeof(port));
}

Fields Failed(const std::string& text, Code code = Code::kUnavailable) {
  return {{"grpc-status", std::to_string(static_cast<int>(code))}, {"grpc-message", PercentEncode(text)}};
}

size_t SizeOf(const Fields& fields) {
  size_t size = 0;
  for (const auto& [name, value] : fields) size += name.size() + value.size() + kFieldOverhead;
  return size;
}

}  // namespace

class InnerStream : public Http2Stream {
 public:
  InnerStream(std::string* body, std::shared_ptr<Answer> answer) : answer_(std::move(answer)) {
    body_.Add(std::move(*body));
    body_.is_ended = true;
  }
  void OnField(std::string_view name, std::string_view value) override { fields_.emplace_back(name, value); }
  void OnHeadersEnd(bool is_end) override {
    Fields fields = std::exchange(fields_, {});
    is_end ? trailers_.swap(fields) : answer_->OnHeaders(std::move(fields));
  }
  void OnData(const char* data, size_t size) override { answer_->OnData({data, size}); }
  void OnClosed() override {
    End(trailers_.empty() ? Failed("Triton's front end for gRPC ended the call.") : std::move(trailers_));
  }
  void End(Fields trailers) { answer_->OnEnd(std::move(trailers)); }

 private:
  const std::shared_ptr<Answer> answer_;
  Fields fields_;  // the headers, or trailers, that are being received
  Fields trailers_;
};

class InnerConnection : public Http2Connection {
 public:
  InnerConnection(Inner* inner, Loop* loop, int fd, std::string name)
      : Http2Connection(loop, fd, nullptr), inner_(inner), name_(std::move(name)) {}

  bool Begin() {
    return Http2Connection::Begin(
        false, {{nghttp2::kSettingsInitialWindowSize, kWindow}, {nghttp2::kSettingsMaxFrameSize, 1 << 20}}, kWindow);
  }

  bool takes_calls() const { return takes_calls_ && !is_closed(); }

  // Returns false if this connection takes no more calls; `body` is then unchanged.
  bool Call(const Fields& fields, std::string* body, const std::shared_ptr<Answer>& answer) {
    auto lock = Lock();
    if (!takes_calls()) return false;
    auto values = NameValues(fields);
    // Values are not put into HPACK's table, so no call changes how later ones are read.
    for (auto& value : values) value.flags = nghttp2::kNoIndex;
    const auto provider = Provider();
    const int32_t stream = api_->submit_request(session_, nullptr, values.data(), values.size(), &provider, nullptr);
    if (stream < 0) {
      takes_calls_ = false;
      return false;
    }
    if (stream > kMostStream) takes_calls_ = false;
    streams_[stream] = std::make_shared<InnerStream>(body, answer);
    Flush(&lock);
    return true;
  }

 protected:
  void OnGoAway() override { takes_calls_ = false; }
  void OnClosed() override {
    decltype(streams_) streams;
    {
      const auto lock = Lock();
      streams.swap(streams_);
    }
    for (auto& [number, stream] : streams) {
      static_cast<InnerStream&>(*stream).End(Failed("The connection to Triton's front end for gRPC ended."));
    }
    const std::lock_guard<std::mutex> lock(inner_->mutex_);
    inner_->own_.erase(name_);
  }

 private:
  Inner* const inner_;
  const std::string name_;
  std::atomic<bool> takes_calls_{true};
};

void Inner::SetAddress(const sockaddr* address, socklen_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::memcpy(&address_, address, size);
  address_size_ = size;
}

bool Inner::IsOwn(int fd) const {
  const std::string name = NameOf(fd, true);
  const std::lock_guard<std::mutex> lock(mutex_);
  return own_.count(name) > 0;
}

// Called with the lock.
std::shared_ptr<InnerConnection> Inner::Connect(std::string* error) {
  const int fd = socket(address_.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    *error = std::strerror(errno);
    return nullptr;
  }
  // The socket is bound first, so that its address is known before the other side may accept it.
  sockaddr_storage any = address_;
  reinterpret_cast<sockaddr_in*>(&any)->sin_port = 0;  // the port lies at the same place in both families
  timeval limit{kConnectTimeoutMs / 1000, 0};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  std::string name;
  if (bind(fd, reinterpret_cast<sockaddr*>(&any), address_size_) == 0) name = NameOf(fd, false);
  if (!name.empty()) own_[name] = fd;
  if (name.empty() || connect(fd, reinterpret_cast<sockaddr*>(&address_), address_size_) != 0) {
    *error = std::strerror(errno);
    own_.erase(name);
    close(fd);
    return nullptr;
  }
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  auto connection = std::make_shared<InnerConnection>(this, loop_, fd, name);
  if (!connection->Begin()) {
    *error = "no memory for another connection";
    own_.erase(name);
    return nullptr;
  }
  return connection;
}

void Inner::Call(ForwardedCall call, std::shared_ptr<Answer> answer) {
  constexpr int kTries = 3;
  Fields fields = {{":method", "POST"},
                   {":scheme", "http"},
                   {":path", std::move(call.path)},
                   {":authority", "localhost"},
                   {"te", "trailers"},
                   {"content-type", "application/grpc"}};
  fields.insert(fields.end(), std::make_move_iterator(call.metadata.begin()),
                std::make_move_iterator(call.metadata.end()));
  if (const size_t size = SizeOf(fields); size > kMostFieldsSize) {
    return answer->OnEnd(Failed("The header fields of the call that are for Triton have " + std::to_string(size) +
                                    " bytes, as HTTP/2 counts them, and its front end for gRPC takes " +
                                    std::to_string(kMostFieldsSize) + ".",
                                Code::kResourceExhausted));
  }
  std::string error = "it takes no calls";
  for (int i = 0; i < kTries; ++i) {
    std::shared_ptr<InnerConnection> connection;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (connection_ == nullptr || !connection_->takes_calls()) connection_ = Connect(&error);
      connection = connection_;
    }
    if (connection != nullptr && connection->Call(fields, &call.body, answer)) return;
  }
  answer->OnEnd(Failed("Triton's front end for gRPC cannot be reached: " + error));
}

}  // namespace pytriton::grpc
