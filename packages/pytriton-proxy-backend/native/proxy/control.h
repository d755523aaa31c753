// Frames between this library and the supervisor of hosts, the processes that run the `model.py` of Python models. Each
// model and each instance has a connection of its own; when it is closed, both sides end what belongs to it.
//
// A frame: u32 size of all that follows, u16 kind, u16 count, then `count` fields, each a u32 length and its bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "wire/shared_limits.h"

namespace pytriton {

// Waits until a descriptor is readable. Returns false after `timeout_ms`.
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

  // Each returns false with the reason.
  bool Connect(const std::string& path, std::string* error);
  bool Send(const Frame& frame, std::string* error);
  // Waits for the next frame until the other side ends, or until `stop_fd` is readable, if it is given.
  bool Receive(Frame* frame, std::string* error, int stop_fd = -1);
  // Waits until the other side has ended, then returns true, or until `stop_fd` is readable.
  bool WaitEnd(int stop_fd);
  bool HasEnded() const;
  // Asks the other side to end what this connection is for, and waits until it has.
  void Finish();

 private:
  bool ReadAll(void* data, size_t size, std::string* error, int stop_fd);

  int fd_;
};

}  // namespace pytriton
