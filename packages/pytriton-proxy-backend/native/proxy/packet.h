// One message of a worker's socket, as it came.
#pragma once

#include <cstdint>
#include <string>

#include "protocol.h"

namespace pytriton {

// A message of a kind, with nothing else in it.
inline Message MessageOf(MessageType type) {
  Message message{};
  message.type = static_cast<uint16_t>(type);
  return message;
}

struct Packet {
  alignas(8) uint8_t bytes[kMaxPacket];
  Message message;
  const uint8_t* body = nullptr;  // in `bytes`, what follows the header
  uint32_t body_length = 0;
  int fd = -1;  // the descriptor that came with a SEGMENT; whoever reads the packet takes it over
};

enum class Received { kPacket, kNothing, kReset, kEnd, kBroken };

// Reads one packet without waiting. kReset: the peer has closed, with messages of ours unread, of which the last is one;
// what it has sent before comes next, and then kEnd. kEnd: the peer has closed. kBroken: it broke the protocol, or the
// socket failed; `error` says how. Only with kPacket a descriptor is left in it.
Received ReceivePacket(int socket, Packet* packet, std::string* error);

// A descriptor of the process that has connected a socket, readable from its end on; -1 where there is none to be had.
int ProcessOf(int socket);

// How long a peer may read nothing, while something must be sent to it.
constexpr int kSendTimeoutMs = 5000;

enum class Sent { kSent, kNoRoom, kFailed };

// Sends one packet without waiting, `fd` with it where that is not negative; writes the size of the message.
Sent SendPacket(int socket, Message* message, const void* body, size_t body_length, int fd, std::string* error);

}  // namespace pytriton
