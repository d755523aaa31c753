// The connection to Triton's own front end, over which calls go that only it can answer. Clients have no influence on
// it: each call is complete when it begins, has no deadline, and is never cancelled. The connection must not end while
// it has calls, because each of them is cancelled then, and Triton's handlers lock the mutex of a call that no longer
// exists.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "http2.h"

namespace pytriton::grpc {

// Gets the answer of a call that was passed on. Called in the thread of the connection's loop.
class Answer {
 public:
  virtual ~Answer() = default;
  virtual void OnHeaders(Fields fields) = 0;
  virtual void OnData(std::string_view data) = 0;
  // Is called last. The trailers have grpc-status.
  virtual void OnEnd(Fields trailers) = 0;
};

struct ForwardedCall {
  std::string path;
  Fields metadata;
  std::string body;  // with the prefixes of its messages
};

class InnerConnection;

class Inner {
 public:
  explicit Inner(Loop* loop) : loop_(loop) {}

  // Sets where Triton's front end listens.
  void SetAddress(const sockaddr* address, socklen_t size);
  // Whether a connection that Triton's front end has accepted is one of these.
  bool IsOwn(int fd) const;

  void Call(ForwardedCall call, std::shared_ptr<Answer> answer);

 private:
  friend class InnerConnection;
  std::shared_ptr<InnerConnection> Connect(std::string* error);

  Loop* const loop_;
  mutable std::mutex mutex_;  // guards what follows
  sockaddr_storage address_{};
  socklen_t address_size_ = 0;
  std::shared_ptr<InnerConnection> connection_;
  std::unordered_map<std::string, int> own_;  // the addresses of the sockets on this side, as getsockname returns them
};

}  // namespace pytriton::grpc
