// One message as it came from a worker's socket.
#pragma once

#include <cstdint>
#include <string>

#include "../wire/protocol.h"

namespace pytriton {

// Makes a message of a type that is otherwise empty.
inline Message MessageOf(MessageType type) {
  Message message{};
  message.type = static_cast<uint16_t>(type);
  return message;
}

struct Packet {
  alignas(8) uint8_t bytes[kMaxPacket];
  Message message;
  const uint8_t* body = nullptr;  // points into `bytes`, behind the header
  uint32_t body_length = 0;
  int fd = -1;  // the descriptor that came with a SEGMENT; whoever reads the packet owns it
};

enum class Received { kPacket, kNothing, kReset, kEnd, kBroken };

// Reads one packet without waiting. kReset: the peer has closed its socket without reading some of our messages, the
// last one among them; the next calls return what it had sent, and then kEnd. kEnd: the peer has closed. kBroken: the
// peer broke the protocol, or the socket failed, see `error`. Only with kPacket may the packet hold a descriptor.
Received ReceivePacket(int socket, Packet* packet, std::string* error);

// Returns a descriptor of the process that connected a socket, which becomes readable when that process ends; -1 if
// none can be had.
int ProcessOf(int socket);

// How long a peer may read nothing while something must be sent to it.
constexpr int kSendTimeoutMs = 5000;

enum class Sent { kSent, kNoRoom, kFailed };

// Sends one packet without waiting, with the descriptor `fd` unless that is negative. Sets the size in the message.
Sent SendPacket(int socket, Message* message, const void* body, size_t body_length, int fd, std::string* error);

}  // namespace pytriton
