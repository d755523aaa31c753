// A TCP connection with or without encryption, by the OpenSSL that tritonserver has loaded; its functions are looked up
// by name.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

namespace pytriton::grpc {

// Certificates in PEM files; `root` is empty if callers need no certificate of their own.
struct TlsFiles {
  std::string certificate;
  std::string key;
  std::string root;
};

class TlsContext {
 public:
  // Returns null with the reason if there is no OpenSSL or a file cannot be used.
  static std::unique_ptr<TlsContext> Make(const TlsFiles& files, std::string* error);
  void* context() const { return context_; }

 private:
  explicit TlsContext(void* context) : context_(context) {}
  void* context_;  // an SSL_CTX, which is never freed because the server uses it until it ends
};

class Socket {
 public:
  // Takes over the descriptor, which must not block. If `tls` is null, the connection is not encrypted.
  Socket(int fd, const TlsContext* tls);
  ~Socket();
  Socket(const Socket&) = delete;

  int fd() const { return fd_; }
  // Like read and writev: -1 with EAGAIN if it would block, 0 from Read at the end. One thread may read while another
  // one writes.
  ssize_t Read(void* buffer, size_t size);
  ssize_t Write(const iovec* parts, int count);
  // Whether decrypted bytes wait to be read, of which the system does not know.
  bool has_pending();
  // Ends the connection; the descriptor stays open until this object is destroyed.
  void Shutdown();

 private:
  ssize_t Result(int result);

  const int fd_;
  std::mutex mutex_;  // guards ssl_
  void* ssl_ = nullptr;
};

}  // namespace pytriton::grpc
