#include "control.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "text/errno_text.h"

namespace pytriton {

namespace {

constexpr char kGone[] = "the process that supervises Python models has ended";
// The supervisor allows half of this time. A supervisor that hangs must not keep the server from ending.
constexpr int kFinishTimeoutMs = 60 * 1000;

template <typename Number>
void Append(std::string* bytes, Number number) {
  bytes->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

template <typename Number>
bool Take(const std::string& bytes, size_t* at, Number* number) {
  if (bytes.size() - *at < sizeof(Number)) return false;
  std::memcpy(number, bytes.data() + *at, sizeof(Number));
  *at += sizeof(Number);
  return true;
}

bool ParseFrame(const std::string& body, Frame* frame) {
  size_t at = 0;
  uint16_t kind = 0;
  uint16_t count = 0;
  if (!Take(body, &at, &kind) || !Take(body, &at, &count)) return false;
  frame->kind = static_cast<FrameKind>(kind);
  frame->fields.clear();
  for (uint16_t i = 0; i < count; ++i) {
    uint32_t length = 0;
    if (!Take(body, &at, &length) || body.size() - at < length) return false;
    frame->fields.push_back(body.substr(at, length));
    at += length;
  }
  return at == body.size();
}

// Waits for either of two descriptors, the second of which may be -1. Returns whether the second one is readable.
bool WaitEither(int fd, short events, int stop_fd) {
  pollfd both[] = {{fd, events, 0}, {stop_fd, POLLIN, 0}};
  while (poll(both, 2, -1) < 0 && errno == EINTR) {
  }
  return both[1].revents != 0;
}

}  // namespace

bool WaitReadable(int fd, int timeout_ms) {
  pollfd one{fd, POLLIN, 0};
  return poll(&one, 1, timeout_ms) > 0;
}

ControlConnection::~ControlConnection() {
  if (fd_ >= 0) close(fd_);
}

bool ControlConnection::Connect(const std::string& path, std::string* error) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    *error = "the path of its socket is too long: '" + path + "'";
    return false;
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd_ < 0) {
    *error = Errno("socket");
    return false;
  }
  if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    *error = Errno("connect") + ": '" + path + "'";
    close(fd_);
    fd_ = -1;
    return false;
  }
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid()) {
    *error = "expected a process of user " + std::to_string(geteuid()) + " at '" + path + "', found one of user " +
             std::to_string(peer.uid);
    return false;
  }
  return true;
}

bool ControlConnection::Send(const Frame& frame, std::string* error) {
  std::string bytes;
  Append(&bytes, uint32_t{0});
  Append(&bytes, static_cast<uint16_t>(frame.kind));
  Append(&bytes, static_cast<uint16_t>(frame.fields.size()));
  size_t total = bytes.size();
  for (const std::string& field : frame.fields) total += sizeof(uint32_t) + field.size();
  if (total > kMaxFrameBytes) {
    *error = "a configuration of " + std::to_string(total) + " bytes is more than the " +
             std::to_string(kMaxFrameBytes) + " that can be sent";
    return false;
  }
  bytes.reserve(total);
  for (const std::string& field : frame.fields) {
    Append(&bytes, static_cast<uint32_t>(field.size()));
    bytes += field;
  }
  const uint32_t size = static_cast<uint32_t>(bytes.size() - sizeof(uint32_t));
  std::memcpy(&bytes[0], &size, sizeof(size));
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t count = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      *error = errno == EPIPE || errno == ECONNRESET ? kGone : Errno("send");
      return false;
    }
    sent += static_cast<size_t>(count);
  }
  return true;
}

bool ControlConnection::ReadAll(void* data, size_t size, std::string* error, int stop_fd) {
  auto* bytes = static_cast<char*>(data);
  for (size_t done = 0; done < size;) {
    if (WaitEither(fd_, POLLIN, stop_fd)) {
      *error = "nobody waits for it any more";
      return false;
    }
    const ssize_t count = recv(fd_, bytes + done, size - done, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      *error = count == 0 || errno == ECONNRESET ? kGone : Errno("recv");
      return false;
    }
    done += static_cast<size_t>(count);
  }
  return true;
}

bool ControlConnection::Receive(Frame* frame, std::string* error, int stop_fd) {
  uint32_t size = 0;
  if (!ReadAll(&size, sizeof(size), error, stop_fd)) return false;
  if (size > kMaxFrameBytes) {
    *error = "expected an answer of at most " + std::to_string(kMaxFrameBytes) + " bytes, got one of " +
             std::to_string(size);
    return false;
  }
  std::string body(size, '\0');
  if (!ReadAll(&body[0], size, error, stop_fd)) return false;
  if (ParseFrame(body, frame)) return true;
  *error = "expected a kind and fields in an answer of " + std::to_string(size) + " bytes: they do not fit";
  return false;
}

bool ControlConnection::WaitEnd(int stop_fd) { return !WaitEither(fd_, POLLRDHUP, stop_fd); }

bool ControlConnection::HasEnded() const {
  pollfd one{fd_, POLLRDHUP, 0};
  return fd_ < 0 || poll(&one, 1, 0) > 0;
}

void ControlConnection::Finish() {
  if (fd_ < 0 || shutdown(fd_, SHUT_WR) != 0) return;
  char ignored[256];
  while (WaitReadable(fd_, kFinishTimeoutMs)) {
    const ssize_t count = recv(fd_, ignored, sizeof(ignored), 0);
    if (count == 0 || (count < 0 && errno != EINTR)) return;
  }
}

}  // namespace pytriton
