// The front end for gRPC that serves inference in place of Triton's own. It takes the port over, calls Triton's C API
// for ModelInfer and ModelStreamInfer, and passes all other calls on. See "The front end for gRPC" in
// docs/architecture.md.
#pragma once

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "call.h"
#include "forwarded.h"
#include "inner.h"

namespace pytriton::grpc {

// What the guard provides for the front end.
struct Surroundings {
  int (*bind)(int, const sockaddr*, socklen_t) = nullptr;  // the functions of the system
  int (*listen)(int, int) = nullptr;
  int (*accept4)(int, sockaddr*, socklen_t*, int) = nullptr;
  int (*close)(int) = nullptr;
  // Puts the listener of the previous server in the place of a socket. It reports which socket listens now, and does
  // nothing else.
  bool (*adopt)(int, const sockaddr*, socklen_t) = nullptr;
  void (*on_listen)(int) = nullptr;
  void (*on_close)(int) = nullptr;
  void (*log)(char severity, const std::string& text) = nullptr;
};

class FrontEnd {
 public:
  // Reads the server's arguments, and removes those that switch on encryption, because this front end encrypts then.
  // Returns null if Triton's own front end must be used; the reason is logged.
  static FrontEnd* Make(int argc, char** argv, const Surroundings& surroundings, size_t max_message_bytes);

  Service& service() { return service_; }
  ForwardedRequests& forwarded() { return forwarded_; }

  // Binds a socket of Triton's front end: its address is bound to a socket of this front end, and it gets one on the
  // loopback interface. Returns false if the socket does not belong to Triton's front end.
  bool Bind(int fd, const sockaddr* address, socklen_t size, int* result);
  void OnListen(int fd);
  // Triton's front end closes its listener, which begins its end.
  void OnClose(int fd);
  bool Has(int fd) const;
  // Whether a connection that Triton's front end has accepted comes from this front end.
  bool IsOwn(int fd) const { return inner_->IsOwn(fd); }

  void OnServer(TRITONSERVER_Server* server) { service_.server.store(server); }
  // Waits until no request is being handed to the server.
  void OnServerEnd();
  // Trace settings were changed: from now on all requests are passed on to Triton's own front end, which traces them.
  void ForwardAll() { service_.forwards_all = true; }

 private:
  class Acceptor;
  struct Listener {
    int fd = -1;  // the descriptor of this front end
    uint64_t number = 0;
  };

  bool StartLoops();
  void WaitForGoodbyes();
  void AcceptAll(int listener);
  void Serve(int fd);

  Surroundings surroundings_;
  Service service_;
  int port_ = 8001;
  std::unique_ptr<TlsContext> tls_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::unique_ptr<Inner> inner_;
  ForwardedRequests forwarded_;
  std::atomic<size_t> next_loop_{0};
  std::unordered_set<int> waiting_;  // listeners that wait for another role; used by the first loop's thread
  mutable std::mutex mutex_;     // guards what follows
  std::unordered_map<int, Listener> listeners_;  // by the descriptors of Triton's front end
  std::vector<std::weak_ptr<ClientConnection>> connections_;
};

}  // namespace pytriton::grpc
