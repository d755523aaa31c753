// Frames between the library and the supervisor of hosts, the processes that run the `model.py` of Python models. Each
// model and each of its instances has a connection of its own, whose end is the end of both sides' part in it.
//
//   u32 size of all that follows, u16 kind, u16 count, then `count` fields, each a u32 length and its bytes
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shared_limits.h"

namespace pytriton {

// Waits until a descriptor is readable; false where that takes longer, in milliseconds.
bool WaitReadable(int fd, int timeout_ms);

struct Frame {
  FrameKind kind;
  std::vector<std::string> fields;
};

class ControlConnection {
 public:
  // Takes over a connected stream socket.
  explicit ControlConnection(int fd = -1) : fd_(fd) {}
  ~ControlConnection();
  ControlConnection(const ControlConnection&) = delete;
  ControlConnection& operator=(const ControlConnection&) = delete;

  // Each is false with the reason.
  bool Connect(const std::string& path, std::string* error);
  bool Send(const Frame& frame, std::string* error);
  // Waits for the next frame as long as the other side lives, or until `stop_fd`, where there is one, is readable.
  bool Receive(Frame* frame, std::string* error, int stop_fd = -1);
  // Waits until the other side has ended, and is true then; or until `stop_fd` is readable.
  bool WaitEnd(int stop_fd);
  bool HasEnded() const;
  // Lets the other side end what the connection is for, and waits until it has.
  void Finish();

 private:
  bool ReadAll(void* data, size_t size, std::string* error, int stop_fd);

  int fd_;
};

}  // namespace pytriton
