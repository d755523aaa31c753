// A TCP connection, encrypted or not. OpenSSL is the one that tritonserver has loaded; its functions are looked up by name.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

namespace pytriton::grpc {

// Certificates as PEM files; `root` empty where callers need no certificate of their own.
struct TlsFiles {
  std::string certificate;
  std::string key;
  std::string root;
};

class TlsContext {
 public:
  // Null, with the reason, where there is no OpenSSL or a file is not what it should be.
  static std::unique_ptr<TlsContext> Make(const TlsFiles& files, std::string* error);
  void* context() const { return context_; }

 private:
  explicit TlsContext(void* context) : context_(context) {}
  void* context_;  // SSL_CTX; never freed, as the server needs it to its end
};

class Socket {
 public:
  // Takes the descriptor, which must not block. `tls` null: not encrypted.
  Socket(int fd, const TlsContext* tls);
  ~Socket();
  Socket(const Socket&) = delete;

  int fd() const { return fd_; }
  // As read and writev; -1 with EAGAIN where it would block, 0 of Read at the end. One thread may read while another
  // one writes.
  ssize_t Read(void* buffer, size_t size);
  ssize_t Write(const iovec* parts, int count);
  // Whether decrypted bytes wait, of which the system knows nothing.
  bool has_pending();
  // Ends the connection; the descriptor stays until this object goes.
  void Shutdown();

 private:
  ssize_t Result(int result);

  const int fd_;
  std::mutex mutex_;  // of ssl_
  void* ssl_ = nullptr;
};

}  // namespace pytriton::grpc
