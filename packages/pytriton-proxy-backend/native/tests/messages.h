// What a worker of a test program receives.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "../proxy/wire/protocol.h"

// Waits for the next message, without its body; false at the end of the connection. Descriptors are closed.
inline bool ReceiveMessage(int socket, pytriton::Message* message) {
  alignas(8) char packet[pytriton::kMaxPacket];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  iovec part{packet, sizeof(packet)};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  if (recvmsg(socket, &header, MSG_CMSG_CLOEXEC) < static_cast<ssize_t>(sizeof(*message))) return false;
  if (const cmsghdr* cmsg = CMSG_FIRSTHDR(&header)) {
    int descriptor;
    std::memcpy(&descriptor, CMSG_DATA(cmsg), sizeof(int));
    close(descriptor);
  }
  std::memcpy(message, packet, sizeof(*message));
  return true;
}
