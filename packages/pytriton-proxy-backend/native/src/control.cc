#include "control.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "errno_text.h"

namespace pytriton {

namespace {

constexpr char kGone[] = "the process that supervises Python models has ended";

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

}  // namespace

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

bool ControlConnection::ReadAll(void* data, size_t size, std::string* error) {
  auto* bytes = static_cast<char*>(data);
  for (size_t done = 0; done < size;) {
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

bool ControlConnection::Receive(Frame* frame, std::string* error) {
  uint32_t size = 0;
  if (!ReadAll(&size, sizeof(size), error)) return false;
  if (size > kMaxFrameBytes) {
    *error = "expected an answer of at most " + std::to_string(kMaxFrameBytes) + " bytes, got one of " +
             std::to_string(size);
    return false;
  }
  std::string body(size, '\0');
  if (!ReadAll(&body[0], size, error)) return false;
  if (ParseFrame(body, frame)) return true;
  *error = "expected a kind and fields in an answer of " + std::to_string(size) + " bytes: they do not fit";
  return false;
}

void ControlConnection::Finish() {
  if (fd_ < 0 || shutdown(fd_, SHUT_WR) != 0) return;
  char ignored[256];
  for (;;) {
    const ssize_t count = recv(fd_, ignored, sizeof(ignored), 0);
    if (count == 0 || (count < 0 && errno != EINTR)) return;
  }
}

}  // namespace pytriton
