#include "packet.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace pytriton {

namespace {

// Linux has these two since 6.5 and 5.3, but the headers may be older.
#ifndef SO_PEERPIDFD
constexpr int SO_PEERPIDFD = 77;
#endif
#ifndef SYS_pidfd_open
constexpr long SYS_pidfd_open = 434;
#endif

// Takes the first descriptor and closes the others. Returns false if there were others, or if some could not be
// received.
bool TakeDescriptor(msghdr* header, int* fd) {
  bool one = (header->msg_flags & MSG_CTRUNC) == 0;
  for (cmsghdr* cmsg = CMSG_FIRSTHDR(header); cmsg != nullptr; cmsg = CMSG_NXTHDR(header, cmsg)) {
    if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor;
      std::memcpy(&descriptor, CMSG_DATA(cmsg) + i * sizeof(int), sizeof(int));
      if (*fd < 0) {
        *fd = descriptor;
      } else {
        one = false;
        close(descriptor);
      }
    }
  }
  return one;
}

}  // namespace

int ProcessOf(int socket) {
  int process_fd = -1;
  socklen_t length = sizeof(process_fd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &process_fd, &length) == 0) return process_fd;
  ucred peer{};
  length = sizeof(peer);
  // The process id is 0 if the process is in a container that this one cannot see into.
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.pid <= 0) return -1;
  return static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
}

Received ReceivePacket(int socket, Packet* packet, std::string* error) {
  iovec part{packet->bytes, sizeof(packet->bytes)};
  msghdr header{};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Received::kNothing;
    if (errno == ECONNRESET) return Received::kReset;
    *error = std::string("reading from it failed: ") + std::strerror(errno);
    return Received::kBroken;
  }
  packet->fd = -1;
  const bool one = TakeDescriptor(&header, &packet->fd);
  if (received == 0) {
    if (packet->fd >= 0) close(packet->fd);
    return Received::kEnd;
  }
  const auto size = static_cast<size_t>(received);
  if (size < sizeof(Message) || (header.msg_flags & MSG_TRUNC) != 0) {
    *error = "it sent a packet of " + std::to_string(size) + " bytes, a message has " +
             std::to_string(sizeof(Message)) + " to " + std::to_string(kMaxPacket);
  } else {
    std::memcpy(&packet->message, packet->bytes, sizeof(Message));
    packet->body = packet->bytes + sizeof(Message);
    packet->body_length = static_cast<uint32_t>(size - sizeof(Message));
    if (packet->message.size != size) {
      *error = "its message says " + std::to_string(packet->message.size) + " bytes, " + std::to_string(size) + " came";
    } else if (!one) {
      // The kernel sets the same flag if this process has no room for another descriptor.
      *error = (header.msg_flags & MSG_CTRUNC) != 0 && packet->fd < 0
                   ? "its descriptor could not be received: this process has too many files open"
                   : "it sent more than one descriptor with a message";
    } else if (packet->fd >= 0 && packet->message.type != static_cast<uint16_t>(MessageType::kSegment)) {
      *error = "it sent a descriptor with a message that carries none";
    } else {
      return Received::kPacket;
    }
  }
  if (packet->fd >= 0) close(packet->fd);
  return Received::kBroken;
}

Sent SendPacket(int socket, Message* message, const void* body, size_t body_length, int fd, std::string* error) {
  message->size = static_cast<uint32_t>(sizeof(Message) + body_length);
  iovec parts[2] = {{message, sizeof(Message)}, {const_cast<void*>(body), body_length}};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = body_length == 0 ? 1 : 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(cmsg), &fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return Sent::kSent;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return Sent::kNoRoom;
  *error = std::string("sending to it failed: ") + std::strerror(errno);
  return Sent::kFailed;
}

}  // namespace pytriton
